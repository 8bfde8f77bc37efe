"""Wraps the corrections of verl, SkyRL, TRL and AReaL from PyPI, one function per configuration.

Only the module that corrects is run. Parents whose ``__init__`` starts engines are replaced by bare packages.
TRL's correction is a part of a method, so it is compiled from the installed source. Inputs are padded [S, L]
tensors (AReaL: packed [T]) that are prepared before the clock starts. "from lists" also measures the padding
of a host's lists.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

GEO, CAP, VETO = (0.999, 1.001), 2.0, 1e-4


def bare(package: str) -> None:
    """Registers a package and its parents with their folder, without running any ``__init__``."""
    parts = package.split(".")
    known = sys.modules.get(parts[0])
    root = Path(
        (known.__path__ if known else importlib.util.find_spec(parts[0]).submodule_search_locations)[0]
    )
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__path__ = [str(root.joinpath(*parts[1 : i + 1]))]
            sys.modules[name] = module


def need(package: str) -> None:
    """Raises ImportError if a system is not installed."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ImportError(f"no package {package}")


def verl() -> dict:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    correct = helper.compute_rollout_correction_and_rejection_mask

    def token(batch):
        return correct(batch.proximal, batch.behavior, batch.mask, "token", CAP)

    def sequence(batch):
        # No veto since PR 4544; the two-sided seq_max_k2 stands in for it, as verl's documentation says.
        rules, bounds = "seq_mean_k1,seq_max_k2", f"{GEO[0]}_{GEO[1]},{math.log(VETO) ** 2 / 2}"
        arguments = batch.proximal, batch.behavior, batch.mask, "sequence", CAP
        return correct(*arguments, rollout_rs=rules, rollout_rs_threshold=bounds)

    return {"T": token, "S": sequence}


def skyrl() -> dict:
    need("skyrl")
    bare("skyrl.backends.skyrl_train.utils")
    utils = importlib.import_module("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")
    unused = "outlier_token_is_threshold_low outlier_token_is_threshold_high token_mask_is_threshold_low"
    off = dict.fromkeys([*unused.split(), "token_mask_is_threshold_high", "sequence_mask_metric"])
    off |= {"tis_ratio_type": "token", "token_tis_ratio_clip_high": CAP, "sequence_tis_ratio_clip_high": CAP}
    token = SimpleNamespace(**off)
    masks = {"sequence_mask_metric": "geometric", "geo_mask_low": GEO[0], "geo_mask_high": GEO[1]}
    sequence = SimpleNamespace(
        **off | masks | {"tis_ratio_type": "sequence", "outlier_token_is_threshold_low": VETO}
    )

    def run(config):
        return lambda b: utils.compute_off_policy_correction(b.proximal, b.behavior, b.mask, config)

    return {"T": run(token), "S": run(sequence)}


def skyrl_loss() -> dict:
    """SkyRL as a host of lists would call it for what our hook returns: padded, and back to a flat loss."""

    def run(correct: Callable[[Any], tuple]) -> Callable[[Any], Tensor]:
        def body(batch: Any) -> Tensor:
            weights, _, mask = correct(batch.padded())
            return batch.host_loss * (weights * mask)[batch.where]

        return body

    return {config: run(correct) for config, correct in skyrl().items()}


def trl() -> dict:
    """Returns GRPOTrainer's importance ratio. It has only weights, no geometric mask and no veto."""
    return {level: trl_ratio(f"{name}_truncate") for level, name in (("T", "token"), ("S", "sequence"))}


def trl_ratio(mode: str, low: float | None = None, high: float | None = CAP) -> Callable[[Any], Tensor]:
    """Compiles the block of GRPOTrainer that computes importance ratios from padded log-probs and a mask."""
    need("trl")
    path = importlib.util.find_spec("trl").submodule_search_locations[0]
    tree = ast.parse(Path(path, "trainer", "grpo_trainer.py").read_text())
    condition = "self.use_vllm and self.vllm_importance_sampling_correction"
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == condition]
    block = next(n for n in blocks if "per_token_logps_diff" in ast.unparse(n))
    code = compile(ast.Module([block], []), "trl/trainer/grpo_trainer.py", "exec")
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )

    def body(b: Any) -> Tensor:
        scope = {"self": trainer, "torch": torch, "math": math, "tool_mask": None}
        scope |= {"completion_mask": b.mask, "old_per_token_logps": b.proximal}
        scope |= {"sampling_per_token_logps": b.behavior}
        exec(code, scope)
        return scope["vllm_importance_sampling_ratio"]

    return body


def of_slime(folder: str, path: str, *names: str, **scope: Any) -> dict[str, Any]:
    """Returns functions and classes of a slime module, without running its other imports."""
    module = Path(folder, "slime", path)
    tree = ast.parse(module.read_text()) if module.exists() else ast.Module([], [])
    kinds = ast.FunctionDef, ast.ClassDef
    wanted = [node for node in tree.body if isinstance(node, kinds) and node.name in names]
    if len(wanted) < len(names):
        raise ImportError(f"no {', '.join(names)} in {module}")
    scope = {"torch": torch, **scope}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(future + wanted, []), str(module), "exec"), scope)
    return scope


def slime_centering(folder: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Returns slime's own score centering (2e5cd7c and later), a function of both heads' log-probs."""
    weights = of_slime(folder, "utils/ppo_utils.py", "importance_weights")["importance_weights"]
    name = "score_centering_correction"
    return of_slime(folder, "utils/score_centering.py", name, importance_weights=weights)[name]


def slime_log_probs(folder: str) -> Callable[..., Tensor]:
    """Returns slime's log-probs at chosen tokens, a function of logits, ids, group and rows."""
    names = ["_VocabParallelTopKLogProbs", "_maybe_all_reduce", "_get_vocab_parallel_rank_size"]
    name = "calculate_topk_log_probs"
    return of_slime(folder, "utils/ppo_utils.py", name, *names, dist=torch.distributed)[name]


def areal() -> dict:
    """Returns AReaL's clamped token weights, or its geometric mask with token weights. It has no veto."""
    need("areal")
    bare("areal.utils.functional")
    bare("areal.api")
    # Both modules import AReaL's engines. The ratio metric reads only fields of the first.
    for module, name in (
        ("areal.api.cli_args", "RejectionSamplingConfig"),
        ("areal.utils.data", "KLEstimator"),
    ):
        sys.modules[module] = types.ModuleType(module)
        setattr(sys.modules[module], name, SimpleNamespace)
    functional = importlib.import_module("areal.utils.functional.functional")
    ratio = {"metric": "ratio", "agg": "mean"}
    token = SimpleNamespace(level="token", action="clamp", upper=CAP, lower=None, **ratio)
    geometric = SimpleNamespace(level="sequence", action="mask", lower=GEO[0], upper=GEO[1], **ratio)

    def run(chosen):
        return lambda b: functional.apply_rejection_sampling(
            b.flat_proximal, b.flat_behavior, b.flat_mask, b.offsets, chosen
        )

    return {"T": run(token), "S": run(geometric)}


def from_lists(system: Callable[[], dict]) -> Callable[[], dict]:
    """Returns a function that builds the same system, but takes lists of responses."""

    def load() -> dict:
        return {config: (lambda batch, run=run: run(batch.padded())) for config, run in system().items()}

    return load


SYSTEMS = {
    "verl": verl,
    "verl, from lists": from_lists(verl),
    "SkyRL": skyrl,
    "SkyRL, from lists": from_lists(skyrl),
    "SkyRL, from lists to the loss": skyrl_loss,
    "TRL": trl,
    "AReaL": areal,
}

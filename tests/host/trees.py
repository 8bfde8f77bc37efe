"""Hosts of a few lines in the layouts of real ones, importable: for what ``init`` finds and wraps.

Their policy loss and train step do what every release's does, on tensors instead of a model.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

# Where a host keeps its policy loss, its log-probs and its train step.
LAYOUTS = {
    "slime": ("slime.backends.megatron_utils.loss",) * 2 + ("slime.backends.megatron_utils.model",),
    "miles-rl 0.0.2": ("miles.backends.training_utils.loss",) * 2 + ("miles.backends.megatron_utils.model",),
    "miles 31f1ca9": (
        "miles.backends.training_utils.loss_hub.losses",
        "miles.backends.training_utils.loss_hub.logit_processors",
        "miles.backends.megatron_utils.model",
    ),
    "miles main": (
        "miles.backends.training_utils.loss.hub.losses",
        "miles.backends.training_utils.loss.hub.logit_processors",
        "miles.backends.megatron_utils.model",
    ),
    "vime": ("vime.backends.megatron_utils.loss",) * 2 + ("vime.backends.megatron_utils.model",),
    "Relax": ("relax.backends.megatron.loss",) * 2 + ("relax.backends.megatron.model",),
}
TARGET = """
def get_log_probs_and_entropy(logits, *, args, **kwargs):
    return None, {"log_probs": logits}
"""
LOSS = """
import importlib
import torch

def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    _, found = get_log_probs_and_entropy(logits, args=args)
    pg_loss = -torch.cat(found["log_probs"]) * torch.cat(batch["advantages"])
    metrics = {}
    if args.use_tis:
        module, _, name = args.custom_tis_function_path.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        keys = ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
        proximal = batch.get("log_probs") or [values.detach() for values in found["log_probs"]]
        kwargs = {"args": args, "pg_loss": pg_loss, "train_log_probs": proximal}
        pg_loss, _, metrics = function(**kwargs, **{key: batch[key] for key in keys})
    return pg_loss.sum(), metrics
"""
STEP = """
from {loss} import *
import {loss} as losses

KEYS = ("cur", "log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths",
        "advantages")

def train_one_step(args, rollout_id, step_id, data_iterator, model, optimizer, opt_param_scheduler,
                   num_microbatches):
    total = 0
    for _ in range(num_microbatches):
        batch = data_iterator[0].get_next(KEYS)
        loss, _ = losses.policy_loss_function(args, batch, batch["cur"], None)
        loss.backward()
        total += loss.detach()
    return {{"loss": total}}, 0.5
"""


def made(folder: Path, monkeypatch, layout: str = "slime", **texts: str) -> SimpleNamespace:
    """A host's loaded modules: loss, model. ``texts`` replace those of loss, target and step; "" leaves a
    module out."""
    names = dict(zip(("loss", "target", "step"), LAYOUTS[layout], strict=True))
    apart = names["target"] != names["loss"]
    head = f"from {names['target']} import get_log_probs_and_entropy\n" if apart else TARGET
    wanted = {
        names["target"]: texts.get("target", TARGET),
        names["loss"]: texts.get("loss", head + LOSS),
        names["step"]: texts.get("step", STEP.format(loss=names["loss"])),
    }
    for name, text in wanted.items():
        path = (folder / name.replace(".", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents:
            (folder / parent / "__init__.py").touch()
    package = names["loss"].partition(".")[0]
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    found = {}
    for role, name in names.items():
        if wanted[name]:
            found[role] = importlib.import_module(name)
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))  # gone again after the test
    return SimpleNamespace(**found, package=package)

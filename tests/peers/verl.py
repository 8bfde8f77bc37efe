"""verl's corrections and losses, behind the engine that counts the tokens of a step."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from tests.peers.wheels import folder, take

NAME, VERSIONS, CLOSE = "verl", ("0.9.1", "0.8.0", "0.7.0", "0.6.1"), 1e-6  # it adds 1e-8 to divisors
BY_LEVEL = ("0.7.0", "0.6.1")  # releases whose rollout_rs is a level; of others it is a list of options
BEFORE_V1 = ("0.8.0", *BY_LEVEL)
OPTIONS = (
    *(f"token_k{i}" for i in (1, 2, 3)),
    *(f"seq_{how}_k{i}" for how in ("sum", "mean") for i in (1, 2, 3)),
    *("seq_max_k2", "seq_max_k3"),
)
NESTED = {"policy_loss": {"loss_mode": "vanilla", "rollout_correction": None},
          "rollout_correction": {"rollout_is": None, "rollout_is_threshold": 2.0, "loss_type": "ppo_clip",
                                 "rollout_rs": None, "rollout_rs_threshold": None}}  # fmt: skip
NO_FLOOR = 1e9  # of dual clip, which is a key of the actor and not of the correction


def block(rng: Any, version: str) -> dict[str, Any]:
    low, high = rng.uniform(0.3, 0.95), rng.uniform(1.05, 3.0)
    by_option = version not in BY_LEVEL
    values: dict[str, Any] = {
        "rollout_is": rng.choice((None, "token", "sequence")),
        "rollout_is_threshold": rng.choice((high, 2.0, *((str(high), f"{low}_{high}") if by_option else ()))),
    }
    if by_option and rng.random() < 0.6:
        chosen = rng.sample(OPTIONS, rng.choice((1, 1, 2)))
        values["rollout_rs"] = ",".join(chosen)
        specs = [f"{low}_{high}" if o.endswith("k1") else str(rng.uniform(0.001, 0.3)) for o in chosen]
        values["rollout_rs_threshold"] = ",".join(specs)
    elif not by_option and rng.random() < 0.6:
        values |= {"rollout_rs": rng.choice(("token", "sequence", "geometric")), "rollout_rs_threshold": high}
        values["rollout_rs_threshold_lower"] = rng.choice((None, low))
    if not by_option and rng.random() < 0.3:
        values["rollout_token_veto_threshold"] = rng.uniform(1e-3, 0.6)
    bypass = rng.random() < 0.3
    if values["rollout_is"] and not bypass and rng.random() < 0.3:
        values["rollout_is_batch_normalize"] = True
    values = {key: value for key, value in values.items() if value is not None}
    pure = {"use_policy_gradient": rng.random() < 0.7} if version == "0.6.1" else {
        "loss_type": rng.choice(("ppo_clip", "reinforce"))
    }  # fmt: skip
    if not bypass:
        # The other fields of the release tell it; those of 0.9.1 and 0.8.0 are the same.
        values |= {key: {"use_policy_gradient": False, "loss_type": "ppo_clip"}[key] for key in pure}
        values |= {"use_v1": version not in BEFORE_V1} if by_option else {}
        values |= {"loss_agg_mode": rng.choice(("token-mean", "seq-mean-token-mean"))}
        return values
    values |= {"bypass_mode": True, **pure}
    if by_option:
        values["use_v1"] = version not in BEFORE_V1
        if (loss := rng.choice((None, "vanilla", "bypass_mode"))) is not None:
            handed = {k: v for k, v in values.items() if k.startswith(("rollout_", "loss_type"))}
            values["policy_loss"] = {"loss_mode": loss}
            values["policy_loss"] |= {"rollout_correction": handed} if loss == "bypass_mode" else {}
    return values


@functools.cache
def package(version: str) -> SimpleNamespace:
    root = folder("verl", version) / "verl"
    means = take(root / "utils/torch_functional.py", "masked_sum", "masked_mean", torch=torch)
    scope: dict[str, Any] = {"torch": torch, "math": math, "verl_F": means, "DataProto": Proto}
    names = ("SAFETY_BOUND", "compute_rollout_rejection_mask", "compute_rs_metrics", "compute_is_metrics")
    names = (*names, "compute_rollout_correction_weights", "compute_rollout_correction_and_rejection_mask")
    names = (*names, "compute_offpolicy_metrics", "compute_rollout_correction_and_add_to_batch")
    if version not in BY_LEVEL:
        names = (*names, "SUPPORTED_ROLLOUT_RS_OPTIONS", "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS")
        names = (*names, "_parse_rollout_is_threshold", "_parse_rollout_rs_thresholds")
    helper = take(root / "trainer/ppo/rollout_corr_helper.py", *names, **scope)
    scope |= vars(helper) | {"AlgoConfig": type(None)}
    losses = ("agg_loss", "compute_policy_loss_vanilla")
    losses += {
        "0.6.1": (
            "compute_policy_loss_with_rollout_correction",
            "compute_policy_loss_rollout_correction_wrapper",
        ),
    }.get(version, ("compute_policy_loss_reinforce", "compute_policy_loss_bypass_mode"))
    found = SimpleNamespace(
        **vars(helper), **vars(take(root / "trainer/ppo/core_algos.py", *losses, **scope))
    )
    if version not in BY_LEVEL:
        accessors = SimpleNamespace(
            assign_non_tensor=lambda data, **values: data.update(values),
            get_non_tensor_data=lambda data, key, default: data.get(key, default),
        )
        engine = {"torch": torch, "tu": accessors, "nullcontext": nullcontext, "get_device_id": lambda: "cpu"}
        engine |= {"prepare_micro_batches": lambda data, **_: ([data], None)}
        engine |= {"postprocess_batch_func": lambda **_: None}
        file = root / "workers/engine/fsdp/transformer_impl.py"
        found.divide = take(file, "forward_backward_batch", **engine).forward_backward_batch
    return found


class Proto(SimpleNamespace):
    """A batch of tensors by name."""

    @classmethod
    def from_dict(cls, tensors: dict[str, Any]) -> Proto:
        return cls(batch=tensors)

    def union(self, other: Proto) -> Proto:
        return Proto(batch={**self.batch, **other.batch})


class Config(SimpleNamespace):
    """A configuration that is also read as a mapping."""

    def get(self, key: str, default: Any = None) -> Any:
        return vars(self).get(key, default)


def loss(settings: dict[str, Any], batch: Any, version: str) -> torch.Tensor:
    functions = package(version)
    mode = settings.get("loss_agg_mode", "token-mean")
    keys = ("rollout_", "bypass", "loss_type", "use_policy")
    options = {key: value for key, value in settings.items() if key.startswith(keys)}
    rows = {"response_mask": batch.mask, "rollout_log_probs": batch.behavior, "old_log_probs": batch.proximal}
    rows["loss_mask"] = batch.mask.clone()  # as its agent loop does when an answer has been sampled
    bypass, weights = settings.get("bypass_mode", False), None
    actor = settings.get("policy_loss", {"loss_mode": "bypass_mode", "rollout_correction": options})
    if bypass:
        rows["old_log_probs"] = rows["rollout_log_probs"]
    else:
        proto = Proto(batch=rows)
        proto, _ = functions.compute_rollout_correction_and_add_to_batch(proto, options)
        rows, weights = proto.batch, proto.batch.get("rollout_is_weights")
        actor = {"loss_mode": "vanilla"}
    if not settings.get("use_v1", False):
        rows["loss_mask"] = rows["response_mask"]  # as left_right_2_no_padding does in the trainer before 0.9
    name = actor.get("loss_mode", "vanilla")
    if version == "0.6.1" and name == "bypass_mode":
        call = functions.compute_policy_loss_rollout_correction_wrapper
        if not options.get("use_policy_gradient"):  # there the wrapper is for the policy gradient alone
            call = functions.compute_policy_loss_vanilla
    else:
        call = getattr(functions, f"compute_policy_loss_{name}")
    config = config_of(actor, mode)
    if version not in BY_LEVEL:
        return divided(functions, rows, batch, weights, config, call)
    total = policy_loss(
        rows, batch, weights, config, call
    )  # its actor averages in a micro-batch, after rejection
    before = (batch.target.detach() if bypass else batch.proximal), batch.behavior, batch.mask
    kept = functions.compute_rollout_correction_and_rejection_mask(*before, **numbers(options))[1]
    rejects = options.get("rollout_rs") or options.get("rollout_token_veto_threshold")
    if bypass and rejects and call is not functions.compute_policy_loss_vanilla:
        return total * kept.sum() / batch.mask.sum()  # a note says that rejected tokens stay
    if mode == "seq-mean-token-mean" and rejects and not bypass:
        return total * kept.any(1).sum() / len(kept)  # a note says that such sequences stay
    return total


def config_of(policy: dict[str, Any], mode: str) -> Config:
    """Returns the actor's configuration, with PPO's clip as in slime."""
    config = Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=NO_FLOOR)
    config.policy_loss, config.global_batch_info, config.loss_agg_mode = Config(**policy), {}, mode
    return config


def policy_loss(rows: dict[str, Any], batch: Any, weights: Any, config: Config, call: Any) -> torch.Tensor:
    """Returns the loss of a micro-batch, averaged by verl's ``agg_loss``."""
    arguments = (rows["old_log_probs"], batch.target, batch.advantages, rows["response_mask"])
    return call(*arguments, loss_agg_mode=config.loss_agg_mode, config=config, rollout_is_weights=weights)[0]


def divided(
    functions: SimpleNamespace,
    rows: dict[str, Any],
    batch: Any,
    weights: Any,
    config: Any = None,
    call: Any = None,
) -> torch.Tensor:
    """Returns the loss of an optimizer step of one micro-batch, whose tokens the engine counts."""
    config = config or config_of({}, "token-mean")
    losses = []

    def forward_step(micro_batch: Any, loss_function: Any, forward_only: bool) -> tuple[Any, dict[str, Any]]:
        counts = {name: micro_batch[name] for name in ("dp_size", "batch_num_tokens")}
        config.global_batch_info = {**counts, "global_batch_size": len(batch.mask)}
        losses.append(
            policy_loss(rows, batch, weights, config, call or functions.compute_policy_loss_vanilla)
        )
        return MagicMock(), {}

    engine = MagicMock(ulysses_sequence_parallel_size=1, forward_step=forward_step, scaler=None)
    engine.get_data_parallel_size = lambda: 1
    engine._gradient_sync_context = lambda **_: nullcontext()
    with patch("torch.distributed.all_reduce", lambda *_, **__: None):  # of one rank
        functions.divide(engine, rows, None)
    return losses[0]


def numbers(options: dict[str, Any]) -> dict[str, Any]:
    """Returns what the correction itself reads."""
    return {"rollout_is": None} | {key: value for key, value in options.items() if key.startswith("rollout_")}


def one_process() -> Any:
    """Stands for the all-reduce of one rank, which changes nothing."""
    return patch("torch.distributed.all_reduce", lambda *_, **__: None)


def synonyms(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns values that mean the same: the trainers differ only in the divisor of a mean over tokens."""
    rejects = settings.get("rollout_rs") and not settings.get("bypass_mode")
    return {} if rejects and per_token(settings) else {"use_v1": (True, False)}


def clamps_as_we_do(settings: dict[str, Any]) -> bool:
    """Whether a ratio beyond e^20 has our gradient; in PPO around the sampler the clamped ratio has none."""
    return not settings.get("bypass_mode")


def per_token(settings: dict[str, Any]) -> bool:
    return settings.get("loss_agg_mode", "token-mean") == "token-mean"

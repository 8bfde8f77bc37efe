"""Weights of systems beyond the seeds are those of a plain transcription of their code."""

from __future__ import annotations

import pytest
import torch

from slime_ext import load_config
from slime_ext.tools.convert import read
from slime_ext.tools.convert.loss_side import LOSS_SIDE
from tests.batches import tokens
from tests.tools.convert import oracle_gates
from tests.tools.convert.common import batch_of


def rlhf(level, **more):
    return {f"is_correction_{key}": value for key, value in {"level": level, **more}.items()}


def of(**more):
    """What the transcription is given."""
    return more


def mask(**more):
    return {f"rho_mask_{key}": value for key, value in more.items()}


DIRECT = {"policy_ratio_denominator": "rollout_policy", "rollout_importance_correction": "none"}
DPPO = {**DIRECT, "loss_fn": "dppo", **mask(metric="tv", source="current_policy", direction="increase_only")}
SWIFT = "rollout_importance_sampling"
TRL = "vllm_importance_sampling"
SAME = [
    ("openrlhf", rlhf("token", mode="clip", threshold=[0.5, 2.0]), of(mode="clip", low=0.5, high=2.0)),
    ("openrlhf", rlhf("token", mode="clip", threshold=2.0), of(mode="clip", high=2.0)),
    ("openrlhf", rlhf("token"), of(low=0.5)),
    ("openrlhf", rlhf("token", gating="tv", threshold=[0.05]), of(gating="tv", high=0.05)),
    ("openrlhf", rlhf("token", gating="binary_kl", threshold="0.05"), of(gating="binary_kl", high=0.05)),
    ("openrlhf", rlhf("seq", threshold=[0.8, 1.2]), of(low=0.8, high=1.2)),
    ("openrlhf", rlhf("seq", gating="binary_kl", threshold=[0.1]), of(gating="binary_kl", high=0.1)),
    ("open_instruct", {}, of(clamp=(0.0, 2.0))),
    ("open_instruct", mask(lower_bound=0.5, upper_bound=5.0), of(clamp=(0.0, 2.0), low=0.5, high=5.0)),
    ("open_instruct", {"rho_clamp_lower_bound": 0.5, **mask(level="sequence", upper_bound=1.1)},
     of(clamp=(0.5, 2.0), level="sequence", high=1.1)),
    ("open_instruct", {"rollout_importance_correction": "none", **mask(metric="kl", upper_bound=0.1)},
     of(metric="kl", high=0.1)),
    ("open_instruct", {**DPPO, "rho_mask_upper_bound": 0.1},
     of(numerator="target", cap=1e300, metric="tv", high=0.1, increase_only=True)),
    ("open_instruct", {**DIRECT, "loss_fn": "cispo", "clip_higher": 0.5, "rho_mask_metric": "none"},
     of(numerator="target", cap=1.5)),
    ("open_instruct", {**DIRECT, "loss_fn": "cispo", "rho_mask_metric": "none"},
     of(numerator="target", cap=1.272)),
    *(("ms_swift", {f"{SWIFT}_mode": mode, f"{SWIFT}_threshold": 1.5}, of(mode=mode, threshold=1.5))
      for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    ("prime_rl", {"type": "ipo", "ipo_threshold": 0.1}, of(eps=0.1)),
    ("prime_rl", {"type": "ipo", "eps": 0.3, "max_importance_ratio": 3.0}, of(eps=0.3, cap=3.0)),
    ("prime_rl", {"type": "ipo", "max_importance_ratio": 3.0}, of(eps=0.3, cap=3.0)),
    ("prime_rl", {"type": "ipo", "eps": 0.2, "kl_tau": 0.01}, of(eps=0.2)),
    ("prime_rl", {"type": "icepop"}, of(low=0.2, high=5.0)),
    ("prime_rl", {"type": "cispo", "ratio_high": 1.5}, of(clip=(0.0, 1.5))),
    ("prime_rl", {"type": "cispo", "ratio_low": 0.5}, of(clip=(0.5, 5.0))),
    ("prime_rl", {"type": "ppo"}, of(ppo=(0.8, 1.2), cap=1e4)),
    ("prime_rl", {"type": "ppo", "ratio_low": 0.9, "ratio_high": 1.5, "max_importance_ratio": 1.6},
     of(ppo=(0.9, 1.5), cap=1.6)),
    ("open_instruct", {"rho_clamp_lower_bound": 0.5, "rho_clamp_upper_bound": 0}, of(clamp=(0.5, 1e300))),
    *(("trl", {f"{TRL}_mode": mode, f"{TRL}_clip_min": low, f"{TRL}_clip_max": high},
       of(mode=mode, low=low, high=high))
      for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
      for low, high in ((0.5, None), (0.5, 2.0), (None, 2.0))),
    *(("roll", {"is_weight": {"enabled": True, "weight_type": level, "upper_bound": 1.3}},
       of(weight=level, bound=1.3)) for level in ("token", "geometric", "sequence")),
    *(("roll", {"is_weight": {"enabled": True},
                "filters": [{"enabled": True, "agg_type": level, "ratio_low": 0.9}]},
       of(weight="token", bound=1.2, filters=[(level, "ratio", 0.9, 1.2)]))
      for level in ("token", "segment", "geometric", "sequence")),
    ("roll", {"filters": [
        {"enabled": True, "agg_type": "segment", "ratio_low": 0.7, "ratio_high": 1.5},
        {"enabled": False, "agg_type": "token"},
        {"enabled": True, "ratio_enabled": False, "diff_enabled": True, "diff_low": -0.1, "diff_high": 0.1}]},
     of(filters=[("segment", "ratio", 0.7, 1.5), ("token", "diff", -0.1, 0.1)])),
]  # fmt: skip


@pytest.mark.parametrize(("system", "block", "how"), SAME)
def test_weights_are_those_of_the_systems_code(system, block, how):
    level = {"level": block["is_correction_level"]} if system == "openrlhf" else {}
    loaded = load_config(read(system, block).mapping)
    for seed in range(40):
        batch = batch_of(seed, far=system != "trl")  # beyond float32 its weights are infinite
        outcome = loaded(tokens(batch)[0])
        got = torch.where(outcome.keep, outcome.weights, 0).double()
        rows = [getattr(oracle_gates, system)(s, **level, **how) for s in batch]
        expected = [
            w * m for s, row in zip(batch, rows, strict=True) for w, m in zip(row, s["mask"], strict=True)
        ]
        want = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-8, msg=lambda m, s=seed: f"seed {s}: {m}")


def test_without_a_range_the_loss_over_the_sampler_is_clipped_at_open_instructs_defaults():
    surrogate = load_config(read("open_instruct", {**DIRECT, "rho_mask_metric": "none"}).mapping).surrogate
    assert (surrogate.anchor, surrogate.eps_low, surrogate.eps_high) == (
        "behavior",
        0.2,
        pytest.approx(0.272),
    )


def test_keys_of_a_loss_name_flags_of_slime():
    assert all(flag.startswith("--") for flag in LOSS_SIDE.values())

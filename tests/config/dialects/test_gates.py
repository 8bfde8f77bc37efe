"""OpenRLHF, open-instruct, ms-swift, prime-rl: weights as a plain transcription of their code has them."""

from __future__ import annotations

import pytest
import torch

from slime_ext import load_config
from slime_ext.config.dialects import LOSS_SIDE, read
from slime_ext.errors import ConfigError
from tests.batches import tokens
from tests.config.dialects import oracle_gates
from tests.config.dialects.common import batch_of


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
    *(("ms_swift", {f"{SWIFT}_mode": mode, f"{SWIFT}_threshold": 1.5}, of(mode=mode, threshold=1.5))
      for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    ("prime_rl", {"type": "ipo", "ipo_threshold": 0.1}, of(eps=0.1)),
    ("prime_rl", {"type": "ipo", "eps": 0.3, "max_importance_ratio": 3.0}, of(eps=0.3, cap=3.0)),
    ("prime_rl", {"type": "icepop"}, of(low=0.2, high=5.0)),
]  # fmt: skip


@pytest.mark.parametrize(("system", "block", "how"), SAME)
def test_weights_are_those_of_the_systems_code(system, block, how):
    level = {"level": block["is_correction_level"]} if system == "openrlhf" else {}
    loaded = load_config(read(system, block).mapping)
    for seed in range(40):
        batch = batch_of(seed)
        outcome = loaded(tokens(batch)[0])
        got = torch.where(outcome.keep, outcome.weights, 0).double()
        rows = [getattr(oracle_gates, system)(s, **level, **how) for s in batch]
        expected = [
            w * m for s, row in zip(batch, rows, strict=True) for w, m in zip(row, s["mask"], strict=True)
        ]
        want = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-8, msg=lambda m, s=seed: f"seed {s}: {m}")


LOSSES = [
    ("open_instruct", {**DIRECT, "clip_higher": 0.3},
     ("target", {"ppo_clip": {"anchor": "behavior", "eps_low": 0.2, "eps_high": pytest.approx(0.3)}})),
    ("open_instruct", DPPO, ("target", "reinforce")),
    ("open_instruct", {"loss_fn": "cispo"}, ("proximal", "host")),
    ("ms_swift", {"off_policy_sequence_mask_delta": 0.1}, ("target", "host")),
    ("prime_rl", {"type": "ipo", "eps": 0.1}, ("target", "reinforce")),
]  # fmt: skip


@pytest.mark.parametrize(("system", "block", "loss"), LOSSES)
def test_the_policy_over_the_sampler_and_the_loss(system, block, loss):
    mapping = read(system, block).mapping
    load_config(mapping)
    assert (mapping["numerator"], mapping["surrogate"]) == loss


REFUSED = [
    (
        "openrlhf",
        rlhf("seq", mode="clip"),
        "is_correction_mode: expected mask beside is_correction_level",
    ),
    (
        "openrlhf",
        rlhf("token", gating="tv"),
        "is_correction_threshold: expected one upper bound beside",
    ),
    (
        "openrlhf",
        rlhf("token", threshold=[1, 2, 3]),
        "is_correction_threshold: expected HIGH, or [LOW",
    ),
    (
        "openrlhf",
        rlhf("geo"),
        "is_correction_level: expected a known value, got 'geo' (known: off, tok",
    ),
    (
        "open_instruct",
        {"loss_fn": "dppo"},
        "loss_fn: expected dapo or cispo beside old_policy, got 'dppo': no surr",
    ),
    ("open_instruct", {"policy_ratio_denominator": "rollout_policy"}, "expected none beside rollout_policy"),
    (
        "open_instruct",
        mask(source="current_policy", upper_bound=2.0),
        "rho_mask_source: expected old_policy beside",
    ),
    (
        "open_instruct",
        mask(level="sequence", direction="increase_only", upper_bound=2.0),
        "expected symmetric at",
    ),
    (
        "ms_swift",
        {f"{SWIFT}_mode": "token_mask", "off_policy_sequence_mask_delta": 0.1},
        "expected null beside",
    ),
    ("ms_swift", {f"{SWIFT}_mode": "seq"}, "(known: token_truncate, token_mask, sequence_truncate"),
    ("prime_rl", {"type": "ipo"}, "eps: expected a value, got nothing: its default was 0.1 and is 0.3 now"),
]


@pytest.mark.parametrize(("system", "block", "line"), REFUSED)
def test_what_no_correction_here_is_gets_one_line(system, block, line):
    with pytest.raises(ConfigError) as caught:
        read(system, block)
    assert line in str(caught.value) and str(caught.value).startswith(f"slime_ext.{system}")


@pytest.mark.parametrize(("system", "block"), [("openrlhf", {}), ("ms_swift", {})])
def test_what_corrects_nothing_is_metrics_only(system, block):
    assert read(system, block).mapping == {"preset": "metrics_only"}


def test_terms_of_a_loss_that_are_not_converted_are_noted():
    assert read("prime_rl", {"type": "ipo", "eps": 0.1}).mapping["terms"]
    capped = {"type": "ipo", "eps": 0.3, "max_importance_ratio": 1e4, "score_centering": True}
    assert read("prime_rl", capped).notes == (
        "score_centering is a term of its loss, which is not converted",
    )


def test_keys_of_a_loss_name_flags_of_slime():
    assert all(flag.startswith("--") for flag in LOSS_SIDE.values())

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
    *(("ms_swift", {f"{SWIFT}_mode": mode, f"{SWIFT}_threshold": 1.5}, of(mode=mode, threshold=1.5))
      for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    *(("trl", {f"{TRL}_mode": mode, f"{TRL}_clip_min": low, f"{TRL}_clip_max": high},
       of(mode=mode, low=low, high=high))
      for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
      for low, high in ((0.5, None), (0.5, 2.0), (None, 2.0))),
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


def test_keys_of_a_loss_name_flags_of_slime():
    assert all(flag.startswith("--") for flag in LOSS_SIDE.values())

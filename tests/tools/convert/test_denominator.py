"""verl divides by the tokens that rejection leaves (its loss_agg_mode token-mean, and per sequence)."""

from __future__ import annotations

import pytest

from slime_ext import tis
from slime_ext.tools.convert import read
from tests.test_tis import arguments, as_slime_calls
from tests.tools.convert import oracle_verl
from tests.tools.convert.common import BATCHES, batch_of, rows

REJECTS = {"rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.9_1.1,0.8_1.25"}
WEIGHS = {"rollout_is": "token", "rollout_is_threshold": 1.5}


def host_sums(batch, per_token):
    """Per sequence: our loss as slime's reducer sums it, and what slime divides that sequence by."""
    args = arguments(slime_ext=read("verl", REJECTS | WEIGHS).mapping, calculate_per_token_loss=per_token)
    loss, masks, _ = tis.correct(args, **as_slime_calls(batch))
    lengths = [len(s["mask"]) for s in batch]
    sums = [float((x * m).sum()) for x, m in zip(loss.detach().split(lengths), masks, strict=True)]
    return sums, [max(sum(s["mask"]), 1) for s in batch]


def kept_sums(batch):
    """Per sequence: verl's weighted loss under its reduced mask, and the tokens of that mask."""
    weights, masks = oracle_verl.head(rows(batch), **REJECTS, **WEIGHS)
    sums, counts = [], []
    for s, weight, mask in zip(batch, weights, masks, strict=True):
        terms = zip(s["host_loss"], weight, mask, strict=True)
        sums.append(sum(x * w for x, w, m in terms if m))
        counts.append(sum(bool(m) for m in mask))
    return sums, counts


@pytest.mark.slow
def test_per_token_it_is_verls_token_mean():
    for seed in range(BATCHES):
        batch = batch_of(seed, far=False)
        ours, counted = host_sums(batch, per_token=True)
        theirs, kept = kept_sums(batch)
        assert sum(ours) / sum(counted) == pytest.approx(sum(theirs) / max(sum(kept), 1), rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_per_sequence_it_is_verls_mean_of_each_sequence():
    for seed in range(BATCHES):
        batch = batch_of(seed, far=False)
        ours = [x / n for x, n in zip(*host_sums(batch, per_token=False), strict=True)]
        assert ours == pytest.approx(
            [x / max(k, 1) for x, k in zip(*kept_sums(batch), strict=True)], rel=1e-9, abs=1e-12
        )


@pytest.mark.parametrize(
    ("block", "lacks"),
    [
        ({"bypass_mode": True}, True),
        ({"bypass_mode": True, "loss_type": "ppo_clip", **WEIGHS}, True),
        ({"bypass_mode": True, "loss_type": "reinforce"}, False),
        ({"rollout_is": "token"}, False),
    ],
    ids=str,
)
def test_the_floor_of_verls_ppo_is_no_key_of_the_block(block, lacks):
    """Its actor's clip_ratio_c; the host has a flag of its own, which dual_clip reads."""
    assert any("floor of dual clip" in note for note in read("verl", block).notes) == lacks

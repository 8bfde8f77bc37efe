"""AReaL's weights and masks are those of a plain transcription; what it ignores is not kept."""

from __future__ import annotations

import itertools

import pytest
import torch

from slime_ext import load_config
from slime_ext.tools.convert import read
from tests.batches import tokens
from tests.tools.convert import oracle_areal
from tests.tools.convert.common import batch_of, flat, rows

SEEDS = range(30)
BOUNDS = {"ratio": ((2.0, None), (2.0, 0.5)), "kl_k1": ((0.3, -0.2),), "kl_k2": ((0.3, None),)}
FILTERS = [
    None,
    *(
        {"level": level, "metric": metric, "agg": agg, "upper": upper, "lower": lower}
        for metric, agg, level in itertools.product(BOUNDS, ("sum", "mean", "max"), ("token", "sequence"))
        for upper, lower in BOUNDS[metric]
        if (metric, agg) != ("kl_k1", "max") and not (level == "token" and agg != "mean")
    ),
    {"action": "clamp", "upper": 2.0, "lower": 0.5},
    {"action": "clamp", "upper": 2.0, "metric": "kl_k2"},
    {"action": "clamp", "level": "sequence", "upper": 1.5, "lower": 0.8, "agg": "sum"},
]


def factors(mapping, packed):
    outcome = load_config(mapping)(packed)
    return torch.where(outcome.keep, outcome.weights, 0).double()


@pytest.mark.parametrize("moment", [None, 0.04], ids=["", "m2"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_decoupled_run_has_the_factors_of_areals_loss(filters, moment):
    if moment and filters and filters.get("agg") == "max" and filters["lower"] is not None:
        pytest.skip("refused")
    block = {"use_decoupled_loss": True, "rejection_sampling": filters, "m2_threshold": moment}
    mapping = read("areal", block).mapping
    for seed in SEEDS:
        batch = batch_of(seed)
        want = oracle_areal.factors(rows(batch), filters, moment)
        got = factors(mapping, tokens(batch)[0])
        torch.testing.assert_close(got, torch.tensor(flat(want), dtype=torch.float64), rtol=1e-9, atol=1e-8)


IGNORED = [{"rejection_sampling": {"upper": 2.0}}, {"m2_threshold": 0.04}, {}]


@pytest.mark.parametrize("block", IGNORED, ids=str)
def test_a_run_that_is_not_decoupled_has_neither_filter_nor_weights(block):
    """Its one ratio is over the recomputed policy, or over the sampler's."""
    recomputed = read("areal", {**block, "use_decoupled_loss": False, "recompute_logprob": True})
    assert recomputed.mapping == {"preset": "metrics_only"}
    around = read("areal", {**block, "use_decoupled_loss": False, "eps_clip": 0.3})
    assert (around.mapping["numerator"], around.mapping["steps"]) == ("target", [])
    assert around.mapping["surrogate"] == {
        "ppo_clip": {"anchor": "behavior", "eps_low": 0.3, "eps_high": 0.3}
    }
    for reading in (recomputed, around):
        assert [note.split()[2] for note in reading.notes if note.startswith("AReaL ignores")] == list(block)


def test_sapo_and_cispo_are_those_losses():
    sapo = read("areal", {"use_sapo_loss": True, "sapo_tau_neg": 1.2})
    assert sapo.mapping["surrogate"] == {"sapo": {"anchor": "behavior", "tau_pos": 1.0, "tau_neg": 1.2}}
    cispo = {"use_cispo_loss": True, "eps_clip": 1.0, "eps_clip_higher": 4.0}
    assert read("areal", cispo).mapping["steps"] == [
        {"reweight": {"level": "token"}},
        {"truncate": {"high": 5.0}},
    ]
    decoupled = read(
        "areal", {**cispo, "use_decoupled_loss": True, "rejection_sampling": {"action": "clamp"}}
    )
    assert decoupled.args == {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0}
    assert decoupled.mapping["surrogate"] == "host"

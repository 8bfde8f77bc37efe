"""Hugging Face -> Megatron -> Hugging Face is the identity, in every layout."""

from __future__ import annotations

import itertools

import pytest
import torch

from slime_ext.launcher.megatron import weights
from tests.launcher.megatron import tiny_model as tiny
from tests.ranks import each, run_ranks

pytestmark = pytest.mark.slow  # processes of their own


def _round_trip(layout, tied, dtype, experts):
    chunks = tiny.start(layout, tied, dtype, experts)
    return weights.gather_hf_state(chunks, tiny.tiny_config(tied, experts))


@pytest.mark.parametrize("layout", tiny.LAYOUTS)
def test_round_trip_is_exact(layout):
    kinds = list(itertools.product((False, True), (torch.float64, torch.float32), (None, tiny.MIXTURE)))
    ranks = run_ranks(each, tiny.LAYOUTS[layout][0], _round_trip, [(layout, *kind) for kind in kinds])
    for kind, (state, *others) in zip(kinds, zip(*ranks, strict=True), strict=True):
        expected = tiny.hf_state(tiny.hf_model(*kind))
        assert state.keys() == expected.keys(), kind
        assert all(torch.equal(state[name], expected[name]) for name in expected), kind
        assert others == [None] * len(others)

"""Kernels on ranks that share sequences: one holds nearly all tokens, the other few or none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from slime_ext.correction import Tokens
from slime_ext.kernels import backend_for
from slime_ext.ops.segments import Segments
from tests.kernels.batches import FULL, random_tokens
from tests.launcher.distributed import run_ranks

LENGTHS = [1300, 60]
SPLITS = (
    ([(0, 0, 1300, 0), (1, 0, 40, 0)], [(1, 40, 60, 1)]),
    ([(0, 0, 1300, 0), (1, 0, 60, 0)], []),
)


def all_sum(values):
    dist.all_reduce(values)
    return values


def shard(packed, pieces):
    begins = [0, LENGTHS[0]]
    held = [begins[s] + i for s, start, stop, _ in pieces for i in range(start, stop)]
    index = torch.tensor(held, dtype=torch.long)
    segments = Segments(tuple(LENGTHS), tuple(pieces), packed.segments.full_mask, 2, all_sum)
    return Tokens(segments, packed.proximal[index], packed.behavior[index]), index


def agrees(backend):
    packed = random_tokens(LENGTHS, noise=2e-3, wild=False)
    expected = FULL(packed)
    for pieces in SPLITS:
        mine, index = shard(packed, pieces[dist.get_rank()])
        got = backend_for(FULL, "cpu", backend).outcome(mine)
        assert torch.equal(got.keep, expected.keep[index])
        torch.testing.assert_close(got.weights, expected.weights[index], rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "compiled"])
def test_any_split_gives_what_one_process_gets(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    run_ranks(agrees, 2, backend)

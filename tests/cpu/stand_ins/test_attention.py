"""Packed, context-parallel attention against a loop over sequences and positions.

Only ranks import Megatron: the server that they are forked from has it, and the tests' workers need 5 s.
"""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

from slime_ext.errors import ConfigError
from slime_ext_cpu.stand_ins import torch_cuda
from tests.ranks import GROUP, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(GROUP)]  # processes of their own

LENGTHS = [8, 24, 0, 16]  # multiples of 2 * 4 ranks; one sequence is empty
HEADS, GROUPS, WIDTH = 4, 2, 6


class OneRank:
    """A context-parallel group of one."""

    def size(self):
        return 1

    def rank(self):
        return 0


def _tensors():
    """Per sequence: (query [L, H, D], key [L, G, D], value [L, G, D], upstream gradient [L, H * D])."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        (draw(n, HEADS, WIDTH), draw(n, GROUPS, WIDTH), draw(n, GROUPS, WIDTH), draw(n, HEADS * WIDTH))
        for n in LENGTHS
    ]


def _naive(query, key, value):
    """One head of one sequence, one position after the other."""
    rows = []
    for t in range(len(query)):
        scores = torch.stack([query[t] @ key[s] / math.sqrt(WIDTH) for s in range(t + 1)])
        rows.append((scores.softmax(0)[:, None] * value[: t + 1]).sum(0))
    return torch.stack(rows)


def _oracle():
    """Per sequence: output [L, H * D] and the gradients of query, key, value."""
    results = []
    for query, key, value, upstream in _tensors():
        leaves = [t.requires_grad_() for t in (query, key, value)]
        if len(query) == 0:
            results.append((upstream, *leaves))
            continue
        heads = [_naive(query[:, h], key[:, h // 2], value[:, h // 2]) for h in range(HEADS)]
        out = torch.stack(heads, 1).flatten(1)
        results.append((out.detach(), *torch.autograd.grad((out * upstream).sum(), leaves)))
    return results


def _params(lengths):
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(ends, dtype=torch.int32))


def _zigzag(length, rank, size):
    """Positions of a sequence on a context-parallel rank: chunks ``rank`` and ``2 size - 1 - rank``."""
    chunk = length // (2 * size)
    first, second = rank * chunk, (2 * size - 1 - rank) * chunk
    return [*range(first, first + chunk), *range(second, second + chunk)]


def _pick(full, rank, size):
    """This rank's rows of every sequence, packed."""
    return torch.cat([x[_zigzag(len(x), rank, size)] for x in full])


def _on_ranks(size):
    from megatron.core import parallel_state

    from slime_ext_cpu.stand_ins import attention

    torch_cuda.replace()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    group = parallel_state.get_context_parallel_group()
    rank = group.rank()
    module = attention.PackedAttention(None, 1, None, "self", pg_collection=SimpleNamespace(cp=group))
    query, key, value, upstream = (_pick(list(x), rank, size) for x in zip(*_tensors(), strict=True))
    leaves = [t.requires_grad_() for t in (query, key, value)]
    out = module(*leaves, None, packed_seq_params=_params(LENGTHS))
    return out.detach(), *torch.autograd.grad((out * upstream).sum(), leaves)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_a_loop(size):
    expected = list(zip(*_oracle(), strict=True))
    for rank, found in enumerate(run_ranks(_on_ranks, size, size)):
        for one, full in zip(found, expected, strict=True):
            torch.testing.assert_close(one, _pick(list(full), rank, size), rtol=0, atol=1e-13)


def _refusals():
    """The errors about lengths that cannot be cut into chunks, and about unpacked input."""
    from slime_ext_cpu.stand_ins import attention

    module = attention.PackedAttention(None, 1, None, "self", pg_collection=SimpleNamespace(cp=OneRank()))
    with pytest.raises(ConfigError) as lengths:
        attention.layout(torch.tensor([0, 4, 10]), 0, 2)
    with pytest.raises(ConfigError) as unpacked:
        module(None, None, None, None)
    return str(lengths.value), str(unpacked.value)


def test_refuses_lengths_that_do_not_cut_into_chunks_and_unpacked_input():
    ((lengths, unpacked),) = run_ranks(_refusals, 1)
    assert re.search(r"lengths in multiples of 4 .* got \[4, 6\]", lengths)
    assert "expected packed_seq_params with qkv_format 'thd'" in unpacked

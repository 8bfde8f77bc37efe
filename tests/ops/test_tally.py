"""Sums per bin, against a loop over the tokens."""

from __future__ import annotations

import pytest
import torch

from slime_ext.ops import tally as module
from slime_ext.ops.tally import count, product, tally

INDEX = torch.tensor([2, 0, 2, 5, 2])
ROWS = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 0.0, 1.0, 0.0, 1.0]])


def test_rows_are_summed_by_bin():
    found = tally(INDEX, ROWS, 6)
    assert found.tolist() == [[2, 0, 21, 0, 0, 8], [0, 0, 3, 0, 0, 0]] and found.dtype == torch.float64


def test_tokens_are_counted_by_bin():
    assert count(INDEX, 6).tolist() == [1, 0, 3, 0, 0, 1]


@pytest.mark.parametrize("size", [2, 5, 100])
def test_the_product_with_a_matrix_is_the_same_whatever_the_slices(size, monkeypatch):
    monkeypatch.setattr(module, "SLICE", size)
    found = product(torch.stack([INDEX, INDEX + 1]), ROWS, torch.arange(6))
    assert torch.equal(found[0].T, tally(INDEX, ROWS, 6))
    assert torch.equal(found[1].T[:, 1:], found[0].T[:, :5]), "what is beyond the last bin is in none"


@pytest.mark.parametrize("body", [lambda i, r: tally(i, r, 6), lambda i, r: count(i, 6)])
def test_a_graph_holds_one_operation(body):
    traced = torch.fx.experimental.proxy_tensor.make_fx(body, tracing_mode="symbolic")(INDEX, ROWS)
    assert torch.equal(traced(INDEX, ROWS), body(INDEX, ROWS))
    assert any("slime_ext" in str(node.target) for node in traced.graph.nodes)

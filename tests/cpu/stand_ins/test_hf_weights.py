"""A model that our loader fills has the logits of transformers' model of the same files, in every layout.

The host is miles from its wheel, whose conversion for pushes the loader inverts. Ranks import the models:
the server that they are forked from has Megatron and transformers, and the tests' workers would need 6 s.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.ranks import GROUP, each, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(GROUP)]

NAMES, EXPERTS = ["qwen3", "qwen3 tied", "qwen2", "llama"], "qwen3 mixture"
LAYOUTS = {"one": (1, 1), "tensor and pipeline 2": (2, 2)}


def _filled(name, *args):
    """Calls a function of filled.py on a rank."""
    return getattr(importlib.import_module("tests.cpu.stand_ins.filled"), name)(*args)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_logits_are_those_of_transformers(layout, tmp_path):
    tensor, pipeline = LAYOUTS[layout]
    names = NAMES + [EXPERTS] * (tensor == 1)
    (wanted,) = run_ranks(_filled, 1, "saved", names, tmp_path)
    cases = [("logits", name, tensor, pipeline, tmp_path / name) for name in names]
    ranks = run_ranks(each, tensor * pipeline, _filled, cases)
    for name, parts in zip(names, zip(*ranks, strict=True), strict=True):
        found = torch.cat([part for part in parts if part is not None], dim=-1)
        torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-4, msg=name)


def test_experts_that_ranks_share_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="whole on each rank, got 2 ranks that share them: without CUDA"):
        run_ranks(_filled, 2, "logits", EXPERTS, 2, 1, tmp_path)


def test_refuses_a_tensor_of_another_shape(tmp_path):
    run_ranks(_filled, 1, "saved_with_a_tensor_of_another_shape", "qwen3", tmp_path)
    wanted = r"expected model.norm.weight to be \(32,\), got \(33,\)"
    with pytest.raises(AssertionError, match=wanted):
        run_ranks(_filled, 1, "logits", "qwen3", 1, 1, tmp_path)

"""A model that our loader fills has the logits of transformers' model of the same files, in every layout.

The host is miles from its wheel, whose conversion for pushes the loader inverts. Ranks import the models:
the server that they are forked from has Megatron and transformers, and the tests' workers would need 6 s.
"""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from tests.ranks import GROUP, each, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(GROUP)]

NAMES, EXPERTS = ["qwen3", "qwen3 tied", "qwen2", "llama"], "qwen3 mixture"
LAYOUTS = {"one": (1, 1), "tensor and pipeline 2": (2, 2)}
MODELS = {"one": [*NAMES, EXPERTS], "tensor and pipeline 2": NAMES}


def _filled(name, *args):
    """Calls a function of filled.py on a rank."""
    return getattr(importlib.import_module("tests.cpu.stand_ins.filled"), name)(*args)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The logits of transformers' models by name, and what each of four ranks answered to each case.

    A layout of fewer ranks is there two or four times.
    """
    folder = tmp_path_factory.mktemp("models")
    (wanted,) = run_ranks(_filled, 1, "saved", [*NAMES, EXPERTS], folder)
    cases = [("logits", models, *LAYOUTS[layout], folder) for layout, models in MODELS.items()]
    cases += [("refused", EXPERTS, 2, 1, folder / EXPERTS), ("refused", "qwen3", 1, 1, folder / "wider")]
    load = functools.partial(_filled, "load")
    ranks = run_ranks(each, 4, _filled, cases, before=load)
    keys = [*MODELS, "experts", "wider"]
    return wanted, dict(zip(keys, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_logits_are_those_of_transformers(layout, answers):
    wanted, found = answers
    for name in MODELS[layout]:
        parts = [rank[name] for rank in found[layout] if rank[name] is not None]
        logits = torch.cat(parts[-LAYOUTS[layout][0] :], dim=-1)
        torch.testing.assert_close(logits, wanted[name], rtol=1e-4, atol=1e-4, msg=name)


def test_experts_that_ranks_share_are_refused(answers):
    for said in answers[1]["experts"]:
        assert "whole on each rank, got 2 ranks that share them: without CUDA" in said


def test_refuses_a_tensor_of_another_shape(answers):
    for said in answers[1]["wider"]:
        assert "expected model.norm.weight to be (32,), got (33,)" in said

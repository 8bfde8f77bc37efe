"""Rounded weights against rounding in plain Python, over every number that a format has."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import random
from argparse import Namespace

import pytest
import torch

from slime_ext_cpu.rounding import ROUNDINGS, round_weights
from slime_ext_cpu.stand_ins import hosts

E4M3 = sorted(
    {m / 8 * 2.0**-6 for m in range(8)}
    | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
)
INPUTS = 160
# largest number of the format, its numbers >= 0, inputs that share a scale
FORMATS = {
    "fp8": (448.0, E4M3, INPUTS),
    "int8": (127.0, [float(n) for n in range(128)], INPUTS),
    "int4": (7.0, [float(n) for n in range(8)], 32),
}


def nearest(value, grid):
    """The grid's number next to |value|; of two that are as near the one with the even place."""
    above = bisect.bisect_left(grid, abs(value))
    best = min((max(above - 1, 0), above), key=lambda i: (abs(grid[i] - abs(value)), i % 2))
    return math.copysign(grid[best], value)


def oracle(row, largest, grid, size):
    """Each weight of an output channel rounded with the scale of its group of inputs."""
    found = []
    for at in range(0, len(row), size):
        group = row[at : at + size]
        scale = max(map(abs, group)) / largest
        found += [nearest(w / scale, grid) * scale for w in group]
    return found


@pytest.mark.parametrize("rounding", FORMATS)
def test_every_weight_becomes_the_nearest_number_of_the_format(rounding):
    largest, grid, size = FORMATS[rounding]
    draw = random.Random(0)
    between = [(a + b) / 2 for a, b in itertools.pairwise(grid)]
    rows = []
    for i in range(130):
        values = draw.choices([*grid, *between], k=100) + [draw.uniform(0, largest) for _ in range(60)]
        values = [v * draw.choice((-1, 1)) for v in values]
        draw.shuffle(values)
        values[::size] = [largest] * (
            INPUTS // size
        )  # so that scales are powers of two and nothing else rounds
        rows.append([v * 2.0 ** (i % 7 + at // size % 3 - 9) for at, v in enumerate(values)])
    weight = torch.tensor(rows)
    assert ROUNDINGS[rounding](weight).tolist() == [
        oracle(row, largest, grid, size) for row in weight.tolist()
    ]


@pytest.mark.parametrize("rounding", FORMATS)
def test_only_the_linear_layers_of_the_blocks_are_rounded(rounding):
    state = {
        name: torch.randn(4, 8)
        for name in (
            "model.embed_tokens.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.mlp.gate.weight",
            "model.layers.0.mlp.experts.3.down_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
            "lm_head.weight",
        )
    }
    state["model.norm.weight"] = torch.randn(8)
    rounded = dict(round_weights(state.items(), rounding))
    changed = {name for name in state if not torch.equal(state[name], rounded[name])}
    attention = {"model.layers.0.self_attn.q_proj.weight"} if rounding != "int4" else set()
    mlp = {"model.layers.0.mlp.experts.3.down_proj.weight", "model.layers.0.mlp.up_proj.weight"}
    assert changed == attention | mlp
    assert all(rounded[name].dtype == tensor.dtype for name, tensor in state.items())


def test_a_channel_of_zeros_stays():
    assert all(torch.equal(function(torch.zeros(3, 5)), torch.zeros(3, 5)) for function in ROUNDINGS.values())


def pushed(monkeypatch, rounding):
    """What a host converts for a push, with the variable set to `rounding`."""
    weights = [
        (name, torch.randn(8, 8)) for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")
    ]

    def convert_to_hf(args, model_name, name, param, quantization_config=None):
        return weights

    monkeypatch.setenv(hosts.ROUND, rounding)
    module = Namespace(convert_to_hf=convert_to_hf)
    hosts.round_pushed(module)
    return weights, module.convert_to_hf(None, "qwen3", "name", None, quantization_config=None)


def test_both_scores_are_of_one_trainer_and_end_with_rounded_weights(monkeypatch, tmp_path):
    """What the engine has at each evaluation, with a trainer whose weights are `trained`."""
    monkeypatch.setenv(hosts.UNROUNDED, str(tmp_path / "unrounded"))
    trained, found = pushed(monkeypatch, "int4")
    rounded = found[1][1]
    module = Namespace(convert_to_hf=lambda *args, **options: trained)
    hosts.round_pushed(module)
    engine, seen = {"weights": rounded}, []

    async def push():
        engine["weights"] = module.convert_to_hf()[1][1]

    async def evaluate():
        seen.append((engine["weights"], hosts.is_unrounded()))

    for score, wanted in ((None, [rounded]), ("both", [rounded, trained[1][1]])):
        seen.clear()
        monkeypatch.setenv(hosts.SCORE, score) if score else monkeypatch.delenv(hosts.SCORE, raising=False)
        asyncio.run(hosts.score(evaluate, push))
        assert [torch.equal(a, b) for (a, _), b in zip(seen, wanted, strict=True)] == [True] * len(wanted)
        assert [flag for _, flag in seen] == [False, True][: len(wanted)]
        assert torch.equal(engine["weights"], rounded) and not hosts.is_unrounded()

    async def fails():
        if hosts.is_unrounded():
            raise RuntimeError("the engine is gone")

    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(hosts.score(fails, push))
    assert not hosts.is_unrounded()


def test_a_push_is_rounded_only_where_the_variable_says_so(monkeypatch):
    trained, found = pushed(monkeypatch, "int4")
    assert torch.equal(found[0][1], trained[0][1]) and found[1][0] == trained[1][0]
    assert torch.equal(found[1][1], ROUNDINGS["int4"](trained[1][1]))
    assert not torch.equal(found[1][1], trained[1][1])
    trained, found = pushed(monkeypatch, "")
    assert found is trained

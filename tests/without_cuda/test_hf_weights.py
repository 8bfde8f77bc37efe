"""Loading is the inverse of the host's export, whatever that does with names, groups and ranks."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from slime_ext.errors import DataError
from slime_ext.without_cuda.stand_ins import hf_weights

HEADS, GROUPS, DIM, WIDTH, FFN = 4, 2, 3, 5, 6
PARTITION = {"qkv": (0, 1), "fc1": (0, 2), "fc2": (1, 1), "norm": (None, 1)}


def export(args, kind, name, whole):
    """As the hosts' convert_to_hf: queries, keys and values apart, gate and up apart."""
    if name == "norm":
        return [("norm.weight", whole)]
    if name == "fc2":
        return [("down", whole)]
    if name == "fc1":
        return list(zip(("gate", "up"), whole.chunk(2), strict=True))
    parts = whole.view(GROUPS, -1, DIM, WIDTH).split([HEADS // GROUPS, 1, 1], 1)
    return [(key, part.reshape(-1, WIDTH)) for key, part in zip("qkv", parts, strict=True)]


def shard(whole, name, rank, size):
    """A rank's part as Megatron keeps it: gate and up are cut each for themselves."""
    dim, stride = PARTITION[name]
    if dim is None:
        return whole
    return torch.cat([piece.chunk(size, dim)[rank] for piece in whole.chunk(stride, dim)], dim)


def gathered(parts, dim, stride):
    """The inverse of `shard` over all ranks."""
    if dim is None:
        return parts[0]
    pieces = [part.chunk(stride, dim) for part in parts]
    return torch.cat([piece[s] for s in range(stride) for piece in pieces], dim)


@pytest.fixture
def host(monkeypatch):
    """A package like the hosts', whose ranks are taken one after the other."""
    from megatron.core import mpu

    state = Namespace(rank=0, size=1)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: state.rank)

    def all_gather_param(name, parameter):
        dim, stride = PARTITION[name]
        first = parameter.data - state.rank * parameter.numel()  # the other ranks' positions follow from ours
        parts = [first + rank * parameter.numel() for rank in range(state.size)]
        return gathered(parts, dim, stride)

    modules = {name: ModuleType(f"ahost.{name}") for name in ("update_weight.common", "megatron_to_hf")}
    modules["update_weight.common"].all_gather_param = all_gather_param
    modules["update_weight.common"].named_params_and_buffers = lambda args, model: model.items()
    modules["megatron_to_hf"].convert_to_hf = export
    for name in ("ahost", "ahost.update_weight"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"ahost.{name}", module)
    return state


def wholes():
    shapes = {
        "qkv": ((HEADS + 2 * GROUPS) * DIM, WIDTH),
        "fc1": (2 * FFN, WIDTH),
        "fc2": (WIDTH, FFN),
        "norm": (WIDTH,),
    }
    return {name: torch.rand(shape) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_gets_its_part_of_what_was_exported(host, folder, size):
    truth = wholes()
    exported = [pair for name, whole in truth.items() for pair in export(None, "", name, whole)]
    save_file({key: value.contiguous() for key, value in exported}, folder / "model.safetensors")
    for rank in range(size):
        host.rank, host.size = rank, size
        parts = {name: shard(whole, name, rank, size) for name, whole in truth.items()}
        model = {name: parameter(part, name) for name, part in parts.items()}
        hf_weights.load(model, Namespace(), folder, "ahost")
        for name, part in parts.items():
            assert torch.equal(model[name], part), (name, rank)


def parameter(like, name):
    made = torch.nn.Parameter(torch.zeros_like(like))
    made.tensor_model_parallel = PARTITION[name][0] is not None
    return made


def test_a_tensor_that_is_missing_is_named(host, folder):
    save_file({"norm.weight": torch.ones(WIDTH)}, folder / "model.safetensors")
    model = {"fc2": parameter(torch.zeros(WIDTH, FFN), "fc2")}
    with pytest.raises(DataError, match="expected the tensor down, got none"):
        hf_weights.load(model, Namespace(), folder, "ahost")

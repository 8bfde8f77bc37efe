"""Products of bfloat16 matrices in float32; on a rank, whose kernel is replaced."""

from __future__ import annotations

import struct
import warnings
from types import SimpleNamespace

import pytest
import torch

from slime_ext_cpu.stand_ins import bfloat16
from tests.ranks import GROUP, run_ranks

LEFT = [[3, -2, 5], [0, 7, 1]]
RIGHT = [[1, 4], [-6, 2], [8, 0]]  # columns are outputs of a linear layer
LARGE = [[100, 90], [80, 17]]  # whose products need more than 8 bits


def _compute():
    """What a process whose kernel is replaced makes of the matrices."""
    warnings.simplefilter("error")
    bfloat16.replace_kernel(torch)
    left, right, large = (
        torch.tensor(rows, dtype=torch.bfloat16, requires_grad=True) for rows in (LEFT, RIGHT, LARGE)
    )
    out = torch.nn.functional.linear(left, right.t())
    out.sum().backward()
    weights = right.detach().t().repeat(600, 1)[:1100]  # of a layer with 1100 outputs, as right's columns
    wide_layer = torch.nn.functional.linear(left.detach(), weights)
    empty = torch.zeros(2, 0, dtype=torch.bfloat16) @ torch.zeros(0, 3, dtype=torch.bfloat16)
    wide = torch.full((1, 1), 1 / 3, dtype=torch.float64) @ torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(RuntimeError) as error:
        torch.mm(left, right.float())
    gradients = {"left": left.grad.tolist(), "right": right.grad.tolist()}
    return gradients | {
        "out": out.tolist(),
        "type": str(out.dtype),
        "large": (large @ large).tolist(),
        "layer": wide_layer.tolist(),
        "empty": empty.tolist(),
        "wide": wide.item(),
        "said": str(error.value),
    }


def _turned(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def _product(left, right):
    columns = _turned(right)
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]


def _rounded(value):
    """To 8 bits, ties to even, by the bits of float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


@pytest.mark.xdist_group(GROUP)
def test_products_and_gradients_are_the_sums_rounded_once():
    (said,) = run_ranks(_compute, 1)
    assert said["out"] == _product(LEFT, RIGHT) and said["type"] == "torch.bfloat16"
    ones = [[1, 1], [1, 1]]
    assert said["left"] == _product(ones, _turned(RIGHT))
    assert said["right"] == _product(_turned(LEFT), ones)
    assert said["layer"] == [row * 550 for row in _product(LEFT, RIGHT)]
    exact = _product(LARGE, LARGE)
    assert said["large"] == [[_rounded(value) for value in row] for row in exact] != exact
    assert said["empty"] == [[0.0] * 3] * 2
    assert said["wide"] == 1 / 3  # float64 stays float64
    assert "dtype" in said["said"]


def _against_torch():
    """The largest distance of ours from torch's products, as a share of what both round."""
    torch.manual_seed(0)
    shapes = (16, 576), (90, 576), (960, 576), (90, 960)
    few, many, weights, grad = (torch.randn(shape).bfloat16() for shape in shapes)
    pairs = (few, weights.t()), (many, weights.t()), (grad, weights), (grad.t(), many)
    of_torch = [a @ b for a, b in pairs]
    bfloat16.replace_kernel(torch)
    largest = []
    for (a, b), theirs in zip(pairs, of_torch, strict=True):
        ours, theirs, size = (a @ b).double(), theirs.double(), a.double().abs() @ b.double().abs()
        ulp = torch.maximum(ours.abs(), theirs.abs()) * 2.0**-7  # of 8 bits, at most
        # size: what float32 loses if sums cancel
        largest.append(((ours - theirs).abs() / (ulp + size * 2.0**-20)).max().item())
    return largest


@pytest.mark.xdist_group(GROUP)
def test_products_equal_those_of_torch_up_to_the_last_bit():
    (shares,) = run_ranks(_against_torch, 1)
    assert len(shares) == 4 and all(share <= 1 for share in shares), shares


@pytest.mark.parametrize(
    ("capabilities", "emulated"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, True),
        ({"avx512_bf16": True, "amx_bf16": False}, False),
        ({"avx512_bf16": False, "amx_bf16": True}, False),
        ({"neon": True, "bf16": True}, False),
        ({}, True),
    ],
)
def test_only_a_cpu_without_the_instructions_gets_it(monkeypatch, capabilities, emulated):
    check_where_it_acts(monkeypatch, capabilities, emulated)


@pytest.mark.parametrize("is_faster", [True, False])
def test_a_run_can_ask_for_it_on_any_cpu_and_multiplies_as_is_faster_there(monkeypatch, is_faster):
    monkeypatch.setenv("SLIME_EXT_BFLOAT16", "float32")
    monkeypatch.setattr(bfloat16, "_is_faster_with_instructions", lambda: is_faster)
    check_where_it_acts(monkeypatch, {"avx512_bf16": True}, True, multiplied=not is_faster)


@pytest.mark.parametrize("slow", [torch.bfloat16, torch.float32])
def test_products_are_tried_in_both_types(monkeypatch, slow):
    """Each product takes a second in the slow type, and a tenth in the other."""
    now = [0.0]

    class Matrix:
        def __init__(self, kind):
            self.kind = kind

        def float(self):
            return Matrix(torch.float32)

        def bfloat16(self):
            return self

        def __matmul__(self, other):
            assert other.kind == self.kind
            now[0] += 1.0 if self.kind == slow else 0.1
            return self

    monkeypatch.setattr(bfloat16.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype: Matrix(dtype))
    assert bfloat16._is_faster_with_instructions() == (slow == torch.float32)


def check_where_it_acts(monkeypatch, capabilities, emulated, multiplied=None):
    calls = []
    fake = SimpleNamespace(get_capabilities=lambda: capabilities)
    monkeypatch.setattr(torch, "cpu", fake)
    monkeypatch.setattr(bfloat16, "replace_kernel", calls.append)
    kept = bfloat16.is_widened, bfloat16.multiplies_in_float32
    for function in kept:
        function.cache_clear()
    try:
        bfloat16.multiply_in_float32(torch)
        assert calls == [torch] * (emulated if multiplied is None else multiplied)
        types = torch.bfloat16, torch.float32, torch.float64
        wide = [torch.float32 if emulated else torch.bfloat16, torch.float32, torch.float64]
        assert [bfloat16.widened(torch.ones(1, dtype=kind)).dtype for kind in types] == wide
    finally:
        for function in kept:
            function.cache_clear()

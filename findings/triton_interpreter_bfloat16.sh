#!/usr/bin/env bash
# Triton's interpreter, which tests kernels without a GPU, adds the bits of bfloat16 numbers as integers: the sum of
# 4,096 ones is 0. A cast to bfloat16 rounds towards zero. In float16, or after a cast to float32, sums are right.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 triton==3.9.0
export TRITON_INTERPRET=1
cat > kernels.py <<'PYTHON'
import torch
import triton
import triton.language as tl
from recorded import expect

SIZE = 4096


@triton.jit
def total(x, out, cast: tl.constexpr, size: tl.constexpr):
    values = tl.load(x + tl.arange(0, size))
    if cast:
        values = values.to(tl.float32)
    tl.store(out, tl.sum(values, 0).to(tl.float32))


@triton.jit
def add(x, y, out, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(out + places, tl.load(x + places) + tl.load(y + places))


@triton.jit
def copy(x, out, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(out + places, tl.load(x + places))


def sum_of_ones(dtype: torch.dtype, cast: bool) -> float:
    out = torch.zeros(1)
    total[(1,)](torch.ones(SIZE, dtype=dtype), out, cast, SIZE)
    return out.item()


def one_plus_one(dtype: torch.dtype) -> float:
    ones, out = torch.ones(SIZE, dtype=dtype), torch.zeros(SIZE, dtype=dtype)
    add[(1,)](ones, ones, out, SIZE)
    return out[0].item()


torch.manual_seed(0)
values, copied = torch.randn(SIZE), torch.zeros(SIZE, dtype=torch.bfloat16)
copy[(1,)](values, copied, SIZE)
other = (copied != values.bfloat16()).float().mean().item()
print("triton", triton.__version__, "interpreter")
for dtype in (torch.float16, torch.bfloat16):
    print(f"  {dtype}: 1 + 1 = {one_plus_one(dtype)}, sum of {SIZE} ones {sum_of_ones(dtype, False)}, "
          f"after a cast to float32 {sum_of_ones(dtype, True)}")
print(f"  float32 numbers that are stored as bfloat16 and differ from torch's: {other:.0%}")
expect("in float16 all are right", one_plus_one(torch.float16) == 2 and sum_of_ones(torch.float16, False) == SIZE)
expect("in bfloat16 1 + 1 is 2^127", one_plus_one(torch.bfloat16) == 2.0**127)
expect("the sum of 4,096 ones is 0", sum_of_ones(torch.bfloat16, False) == 0)
expect("after a cast to float32 it is right", sum_of_ones(torch.bfloat16, True) == SIZE)
expect("half of the numbers are rounded to another one", 0.4 < other < 0.6)
expect("each towards zero", bool((copied.float().abs() <= values.abs()).all()))
PYTHON
run kernels.py 2> errors

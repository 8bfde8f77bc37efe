"""Compiles the kernels of a few corrections for an H200 (sm_90) and prints the size of each; needs no GPU.

python -m tests.kernels.build_for_cuda
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slime_ext.kernels import device
from slime_ext.kernels.passes import Parts
from slime_ext.kernels.triton import kernels_of
from slime_ext.metrics import Layout
from tests.kernels.batches import CORRECTIONS

BYTES, LONGS = "masks groups", "owners begins sizes places offsets"
DOUBLES = "partials table numbers ages rows sums highest log_sums"
FLAGS, WORDS, SIZES = "keeps finites kepts clippeds", "acteds histogram", "chunks sequences RATIO COUNT"
KINDS = {"*u8": BYTES, "*i64": LONGS, "*fp64": DOUBLES, "*i1": FLAGS, "*i32": WORDS, "i32": SIZES}
TYPES = {name: kind for kind, names in KINDS.items() for name in names.split()}
EVERYTHING = "GROUPS OUTCOME BOUNDS OBSERVE LOSS SCALED CURVES AGED HERE".split()
NUMBERS = {"WIDE": tl.float32, "LANES": 1024, "NEEDS": 4, "ROOM": 1024, "FLAGS": 9}


def build(kernel, floats: str) -> int:
    """Bytes of machine code."""
    constants = NUMBERS | dict.fromkeys(EVERYTHING, True)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: TYPES.get(name, floats) for name in kernel.arg_names} | dict.fromkeys(
        constants, "constexpr"
    )
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    built = triton.compile(ASTSource(kernel, types, places), target=GPUTarget("cuda", 90, 32))
    return len(built.asm["cubin"])


def main() -> None:
    for name, floats in (("full", "*fp32"), ("every", "*bf16"), ("m2", "*fp32")):
        correction = CORRECTIONS[name]
        parts = Parts(observe=True, layout=Layout.of(correction))
        module = kernels_of(correction, correction.needs(observe=True), parts)
        print(name, floats, *(build(getattr(module, kernel), floats) for kernel in ("statistics", "correct")))
    print("shared", "*fp64", build(device.totals, "*fp64"), build(device.reduced, "*fp64"))


if __name__ == "__main__":
    main()

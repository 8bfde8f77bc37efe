"""Compiles the kernels of a few corrections for an H200 (sm_90) and prints the size of each; needs no GPU.

python -m tests.kernels.build_for_cuda
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slime_ext.kernels.triton import kernels_of
from tests.kernels.batches import CORRECTIONS

BYTES, LONGS, DOUBLES = "masks groups", "owners begins sizes", "partials table numbers ages"
FLAGS, WORDS, SIZES = "keeps finites kepts clippeds", "acteds histogram", "chunks sequences"
KINDS = {"*u8": BYTES, "*i64": LONGS, "*fp64": DOUBLES, "*i1": FLAGS, "*i32": WORDS, "i32": SIZES}
TYPES = {name: kind for kind, names in KINDS.items() for name in names.split()}
EVERYTHING = dict.fromkeys(("GROUPS", "ACTS", "LOSS", "SCALED", "HISTOGRAM"), True)


def build(kernel, floats: str) -> int:
    """Bytes of machine code."""
    constants = {"WIDE": tl.float32, "LANES": 1024, **EVERYTHING}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: TYPES.get(name, floats) for name in kernel.arg_names} | dict.fromkeys(
        constants, "constexpr"
    )
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    built = triton.compile(ASTSource(kernel, types, places), target=GPUTarget("cuda", 90, 32))
    return len(built.asm["cubin"])


def main() -> None:
    for name, floats in (("full", "*fp32"), ("every", "*bf16"), ("m2", "*fp32")):
        module = kernels_of(CORRECTIONS[name], observe=True)
        print(name, floats, *(build(getattr(module, kernel), floats) for kernel in ("statistics", "correct")))


if __name__ == "__main__":
    main()

"""Compiles the kernels of a few corrections for an H200 (sm_90) and prints of each the registers of a thread
and the bytes of its stack, which are those that found no register; needs no GPU.

python -m tests.kernels.build_for_cuda
"""

from __future__ import annotations

import re
import subprocess
import tempfile

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slime_ext.kernels import device
from slime_ext.kernels.chunks import FEWEST, MOST
from slime_ext.kernels.machine_code import options
from slime_ext.kernels.passes import Parts
from slime_ext.kernels.triton import OF_ALL, OF_SEQUENCE, kernels_of
from slime_ext.metrics import Layout
from tests.kernels.batches import CORRECTIONS

BYTES, LONGS = "masks groups", "owners begins sizes places offsets"
DOUBLES = "partials table numbers ages rows sums highest log_sums"
FLAGS, WORDS, SIZES = "keeps finites kepts clippeds", "acteds histogram", "chunks sequences RATIO COUNT"
KINDS = {"*u8": BYTES, "*i64": LONGS, "*fp64": DOUBLES, "*i1": FLAGS, "*i32": WORDS, "i32": SIZES}
TYPES = {name: kind for kind, names in KINDS.items() for name in names.split()}
EVERYTHING = "GROUPS OUTCOME BOUNDS OBSERVE LOSS SCALED CURVES AGED HERE".split()
NUMBERS = {"WIDE": tl.float32, "NEEDS": 4, "ROOM": 1024, "FLAGS": 9}


def build(kernel, floats: str, lanes: int) -> str:
    """Registers of a thread and bytes of its stack."""
    constants = NUMBERS | dict.fromkeys(EVERYTHING, True) | {"LANES": lanes}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: TYPES.get(name, floats) for name in kernel.arg_names} | dict.fromkeys(
        constants, "constexpr"
    )
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, places)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options(lanes))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        asked = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        used = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return " ".join(re.search(r"REG:(\d+) STACK:(\d+)", used).groups())


def main() -> None:
    for name, floats in (("full", "*fp32"), ("every", "*bf16"), ("m2", "*fp32")):
        correction = CORRECTIONS[name]
        parts = Parts(observe=True, layout=Layout.of(correction))
        module = kernels_of(correction, correction.needs(observe=True), parts)
        for lanes in (FEWEST, MOST):
            print("statistics", build(module.statistics, floats, lanes), name, lanes)
            print("correct", build(module.correct, floats, lanes), name, lanes)
    print("totals", build(device.totals, "*fp64", OF_SEQUENCE))
    print("reduced", build(device.reduced, "*fp64", OF_ALL))


if __name__ == "__main__":
    main()

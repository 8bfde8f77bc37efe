"""Prints how many machine codes Triton would make of each kernel for micro-batches of many shapes; compiles
nothing and needs no GPU.

python -m tests.kernels.variants
"""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import chain

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from slime_ext.correction import Tokens
from slime_ext.kernels import Work
from slime_ext.kernels.triton import Triton
from slime_ext.metrics import Layout
from slime_ext.ops.segments import Segments
from tests.kernels.batches import FULL

SEQUENCES = (1, 2, 3, 16, 17, 32)
TOKENS = 1025, 2048  # of a sequence, so that every call has chunks of as many lanes


class NoDevice:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def call(lengths: list[int]) -> None:
    """A whole call, its log-probs parts of one array as the hook packs them."""
    numerator, behavior = torch.zeros(2, sum(lengths)).unbind()
    tokens = Tokens(Segments.whole(lengths, torch.ones(sum(lengths))), numerator, behavior)
    Triton(FULL).apply(Work(tokens, torch.zeros(sum(lengths)), layout=Layout.of(FULL)))


def main() -> None:
    found = defaultdict(set)

    def asked(*, key: str, fn: object, **rest: object) -> bool:
        found[fn.name.rpartition(".")[2]].add(key)
        return True  # and do not compile

    driver.set_active(NoDevice())
    triton.knobs.runtime.jit_cache_hook = asked
    rng = random.Random(0)
    for count in chain.from_iterable([SEQUENCES] * 5):
        call([rng.randint(*TOKENS) for _ in range(count)])
    for name, keys in sorted(found.items()):
        print(name, len(keys))


if __name__ == "__main__":
    main()

"""Times the hook as slime calls it, beside slime's mis.py, verl, SkyRL and a copy.

The copy reads what a call reads on the device: three tensors and the loss, 16 bytes per token. Configurations
are those of benchmarks.speed: T has token weights with a cap, S has sequence weights with a cap, a rejection
and a veto.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.on_cuda import timing
from benchmarks.on_cuda.timing import Row
from benchmarks.speed.run import FLOOR, contenders
from benchmarks.speed.workloads import Batch

SEQUENCES = 64
TOKENS = (1 << 15, 1 << 20, 1 << 23)
REPEAT = 20
TOKENS_DRY, REPEAT_DRY = (1 << 12,), 3
COPY, MIS = "copy on the device", "slime mis.py"


def batch_on(device: str, tokens: int) -> Batch:
    """Makes a batch of 64 equal sequences on the device, in every layout needed."""
    batch = Batch.of([tokens // SEQUENCES] * SEQUENCES)
    made = {name: getattr(batch, name) for name in ("where", "proximal", "behavior", "mask")}
    for name, value in {**vars(batch), **made}.items():
        if isinstance(value, torch.Tensor):
            setattr(batch, name, value.detach().to(device).requires_grad_(name == "host_loss"))
    return batch


def copy(batch: Batch) -> None:
    """Reads what a hook call reads, and writes as many bytes."""
    for tensor in (batch.flat_proximal, batch.flat_behavior, batch.flat_mask, batch.host_loss.detach()):
        tensor.clone()


def bodies(config: str, device: str, slime: str | None) -> dict[str, Callable[[Batch], object]]:
    """Returns name -> contender, without the floor, which is code for a CPU."""
    by_name = {COPY: copy} | contenders(config, slime, device)
    return {name: body for name, body in by_name.items() if name != FLOOR}


def timed(config: str, tokens: int, device: str, repeat: int, slime: str | None, until: float) -> list[Row]:
    """Returns a row for each contender on one batch."""
    batch = batch_on(device, tokens)
    calls = {k: functools.partial(body, batch) for k, body in bodies(config, device, slime).items()}
    rows = timing.measure(Row(f"hook, {config}", tokens, ""), calls, device, repeat, until)
    known = {row.contender: row.milliseconds for row in rows}
    return [_beside(row, known.get(COPY), known.get(MIS)) for row in rows]


def _beside(row: Row, copied: float | None, mis: float | None) -> Row:
    if row.milliseconds is None:
        return row
    return replace(
        row,
        times_copy=row.milliseconds / copied if copied else None,
        times_mis=mis / row.milliseconds if mis else None,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--slime")
    parser.add_argument("--beside", nargs="*", default=[], help="checkouts of verl and SkyRL")
    options = parser.parse_args(argv)
    sys.path[:0] = options.beside
    dry, until = options.device == "cpu", time.monotonic() + options.seconds
    torch.set_num_threads(1)
    for tokens in TOKENS_DRY if dry else TOKENS:
        for config in "T" if dry else "TS":
            repeat = REPEAT_DRY if dry else REPEAT
            timing.append(timed(config, tokens, options.device, repeat, options.slime, until), options.lines)


if __name__ == "__main__":
    main()

"""The Triton backend: four kernels per call, two of them written from the correction's steps.

``statistics`` adds up chunks and ``totals`` makes sequences of them; ``correct`` decides, writes and measures
chunks, and ``reduced`` adds up what was measured.
"""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from slime_ext.correction import OBSERVED, Correction, Tokens
from slime_ext.kernels.apply import Work, over_ranks
from slime_ext.kernels.chunks import Chunks
from slime_ext.kernels.machine_code import options
from slime_ext.kernels.passes import Named, Parts, TwoPasses, room
from slime_ext.kernels.triton_text import EXTREMES, ROOM, VALUES, source
from slime_ext.metrics.layout import CURVE_BINS, CURVE_COLUMNS, Layout
from slime_ext.ops.statistics import Need

OF_SEQUENCE, OF_ALL = 256, 1024  # lanes of the kernels that add up the chunks of a sequence, and of all
CELLS = CURVE_BINS * len(CURVE_COLUMNS)
INPUTS = ("numerators", "behaviors", "masks", "advantages", "owners", "begins", "sizes")
DECIDED = ("numbers", "ages", "groups")
OUTCOME = ("weights", "keeps", "finites", "log_ratios", "kepts", "clippeds", "acteds")
LOSS = ("losses", "scales", "factors", "products", "ratios", "bounded_ones", "rejected_ones")

_written: dict[tuple[Correction, tuple[Need, ...], Layout | None], ModuleType] = {}
_lock = threading.Lock()


def kernels_of(correction: Correction, needs: tuple[Need, ...], parts: Parts) -> ModuleType:
    """The compiled-on-demand kernels; Triton reads their source from a file of this process."""
    key = (correction, needs, parts.layout)
    with _lock:
        if key not in _written:
            folder = tempfile.mkdtemp(prefix="slime_ext_")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder) / f"kernels_{len(_written)}.py"
            path.write_text(source(correction, needs, parts))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            _written[key] = module
        return _written[key]


@dataclass(frozen=True, eq=False)
class Triton(TwoPasses):
    """Triton kernels for one correction; nothing at all stays eager."""

    name: str = "triton"

    def _serves(self, tokens: Tokens, parts: Parts) -> bool:
        return tokens.segments.size > 0

    def _weights(self, loss: Tensor) -> bool:
        return True

    def _run(self, work: Work, parts: Parts) -> Named:
        call = Call.of(self.correction, self._needs(parts), work, parts)
        call.arrays.update(self._settled(work.tokens, work.plan))
        with _on(work.tokens.segments.device):
            call.sum_up()
            call.correct()
            if parts.layout is not None:
                call.reduce()
        return call.arrays


@dataclass(frozen=True)
class Call:
    """The kernels of one call and every array that they share."""

    kernels: ModuleType
    needs: tuple[Need, ...]
    work: Work
    parts: Parts
    chunks: Chunks
    wide: torch.dtype
    arrays: Named

    @classmethod
    def of(cls, correction: Correction, needs: tuple[Need, ...], work: Work, parts: Parts) -> Call:
        tokens = work.tokens
        read = {"numerators": correction.numerator_of(tokens), "behaviors": tokens.behavior}
        wide = torch.float64 if torch.float64 in {value.dtype for value in read.values()} else torch.float32
        if tokens.advantages is not None:
            read["advantages"] = tokens.advantages
        if parts.loss:
            read["losses"] = work.host_loss
        chunks = Chunks.of(tokens.segments, by_position=parts.layout is not None and parts.layout.curves)
        arrays = {name: value.detach().contiguous() for name, value in read.items()} | room(work, parts, wide)
        arrays |= {"owners": chunks.owners, "begins": chunks.begins, "sizes": chunks.sizes}
        arrays |= {"places": chunks.places, "masks": tokens.segments.mask.contiguous().view(torch.uint8)}
        return cls(kernels_of(correction, needs, parts), needs, work, parts, chunks, wide, arrays)

    def sum_up(self) -> None:
        """The table [K, S] of sums over every sequence on all ranks, and an empty histogram."""
        segments, count = self.work.tokens.segments, self.chunks.count
        self.arrays["histogram"] = self._new(ROOM, dtype=torch.int32)
        self.arrays["table"] = table = self._new(len(self.needs), segments.count)
        if not self.needs and self.parts.layout is None:
            return
        partials = self._new(len(self.needs), count)
        self._launch("statistics", INPUTS, partials, count)
        sizes = {"NEEDS": len(self.needs), "LANES": OF_SEQUENCE, "ROOM": ROOM}
        arrays = (partials, self.chunks.offsets, table, self.arrays["histogram"], count, segments.count)
        _start(_device().totals, segments.count, segments.device, *arrays, **sizes)
        self.arrays["table"] = over_ranks(table, segments.all_sum)

    def correct(self) -> None:
        """Decides, writes and measures chunk by chunk."""
        plan, parts, arrays = self.work.plan, self.parts, self.arrays
        arrays["rows"] = self._new(0 if parts.layout is None else rows_of(parts.layout), self.chunks.count)
        more = [self._at(name) for name in (*DECIDED, *OUTCOME, *LOSS, "histogram", "rows")]
        self._launch(
            "correct",
            INPUTS,
            *(arrays["table"], self.work.tokens.segments.count, *more, self.chunks.count),
            GROUPS=plan.keep is not None,
            OUTCOME=parts.outcome,
            BOUNDS=parts.bounds,
            OBSERVE=parts.outcome and parts.observe,
            LOSS=parts.loss,
            SCALED=plan.scale is not None,
        )

    def reduce(self) -> None:
        """Adds up what was measured."""
        layout, segments, count = self.parts.layout, self.work.tokens.segments, self.chunks.count
        places = [self.needs.index(need) for need in OBSERVED]
        names = ("kepts", "ages", "histogram", "sums", "highest", "log_sums")
        kepts, ages, *rest = (self._at(name) for name in names)
        rows, owners, at, table = (self.arrays[name] for name in ("rows", "owners", "places", "table"))
        programs = rows_of(layout) + 1 + (2 * CELLS if layout.curves else 0)
        arrays = (rows, count, owners, at, table, *places, kepts, ages, segments.count, *rest)
        constants = {"FLAGS": len(layout.flags), "CURVES": layout.curves, "AGED": "ages" in self.arrays}
        constants |= {"HERE": self.work.first, "LANES": OF_ALL}
        _start(_device().reduced, programs, segments.device, *arrays, **constants)

    def _launch(self, name: str, inputs: tuple[str, ...], *more: Any, **constants: Any) -> None:
        arrays = (self._at(name) for name in inputs)
        device = self.work.tokens.segments.device
        constants |= {"WIDE": _wide(self.wide), "LANES": self.chunks.lanes}
        _start(getattr(self.kernels, name), self.chunks.count, device, *arrays, *more, **constants)

    def _at(self, name: str) -> Tensor:
        """An array; what is not there may be any, since nobody follows that pointer."""
        return self.arrays.get(name, self.arrays["keeps"])

    def _new(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.work.tokens.segments.device)


def rows_of(layout: Layout) -> int:
    """How many rows ``correct`` writes for ``reduced``."""
    return len(VALUES) + len(layout.flags) + len(EXTREMES) + (CELLS if layout.curves else 0)


def _device() -> ModuleType:
    from slime_ext.kernels import device

    return device


def _start(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Runs a kernel."""
    if device.type == "cuda":
        constants |= options(constants["LANES"])
    kernel[(programs,)](*arguments, **constants)


def _on(device: torch.device) -> AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _wide(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float64 if dtype is torch.float64 else tl.float32

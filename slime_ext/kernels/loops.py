"""The compiled backend on a CPU: two passes over the tokens in C++, written from the correction's steps."""

from __future__ import annotations

import ctypes
import threading
import warnings
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from slime_ext.correction import OBSERVED, Correction, Outcome, Plan, Sequences, Tokens
from slime_ext.kernels.apply import Applied, Eager, Weighted, Work, finish, over_ranks, settled
from slime_ext.kernels.built import BuildError, library
from slime_ext.kernels.cpp_text import ARRAYS, Parts, needs_of, source
from slime_ext.metrics.layout import COLUMNS, HIGHEST, LOG_SUMS, Layout
from slime_ext.metrics.measure import Measured
from slime_ext.objectives import Host
from slime_ext.ops.grid import host_ints
from slime_ext.ops.segments import Segments

SMALLEST = 1024  # tokens; below, building costs more than it saves
Named = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Loops:
    """C++ loops for one correction. Small batches, float64 and machines that cannot build run eagerly."""

    correction: Correction
    name: str = "compiled"

    def __post_init__(self) -> None:
        self.__dict__.update(_built={}, _lock=threading.Lock(), _eager=Eager(self.correction))

    def outcome(
        self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False, bounds: bool = False
    ) -> Outcome:
        """As ``Correction.__call__``."""
        parts = Parts(outcome=True, bounds=bounds or observe, observe=observe)
        if not self._serves(tokens, parts):
            return self._eager.outcome(tokens, plan, observe=observe, bounds=bounds)
        plan = settled(self.correction, tokens, plan)
        return self._outcome(tokens, plan, self._run(Work(tokens, tokens.behavior, plan), parts), parts)

    def apply(self, work: Work) -> Applied:
        """As ``Eager.apply``; the second pass weights the host's loss and measures."""
        parts = self._parts(work)
        if not self._serves(work.tokens, parts):
            return self._eager.apply(work)
        work = replace(work, plan=settled(self.correction, work.tokens, work.plan))
        found = self._run(work, parts)
        if parts.outcome:
            outcome = self._outcome(work.tokens, work.plan, found, parts)
            return finish(
                self.correction, outcome, work, lambda *seen: _with_surrogate(_measured(found), *seen)
            )
        keep = found["keeps"]
        loss = Weighted.apply(work.host_loss, found["products"], found["factors"], keep)
        channel = found["ratios"], found["bounded_ones"], found["rejected_ones"]
        return Applied(loss, keep, channel, None if work.layout is None else _measured(found))

    def _parts(self, work: Work) -> Parts:
        """Losses that are not the host's are computed from the outcome, operation by operation."""
        weighs = work.acts and isinstance(self.correction.surrogate, Host) and not self.correction.is_identity
        loss = weighs and work.host_loss.dtype is torch.float32
        return Parts(not loss, loss, not loss, work.layout is not None, work.layout)

    def _serves(self, tokens: Tokens, parts: Parts) -> bool:
        wide = torch.float64 in (tokens.proximal.dtype, tokens.behavior.dtype)
        return tokens.segments.size >= SMALLEST and not wide and self._library(parts) is not None

    def _library(self, parts: Parts) -> ctypes.CDLL | None:
        with self._lock:
            if parts not in self._built:
                self._built[parts] = _library(source(self.correction, parts))
            return self._built[parts]

    def _run(self, work: Work, parts: Parts) -> Named:
        """Both passes. Returns every array by its name."""
        tokens, segments = work.tokens, work.tokens.segments
        kernels, count = self._library(parts), segments.count
        arrays = self._read(tokens) | _pieces(segments)
        sizes = (arrays["bounds"].numel() - 1, segments.size, count, int(work.first))
        table = torch.zeros(len(needs_of(self.correction, parts)), count, dtype=torch.float64)
        arrays["table"] = table
        if table.numel():
            _call(kernels.statistics, arrays, sizes)
            arrays["table"] = over_ranks(table, segments.all_sum)
        arrays |= self._settled(tokens, work.plan) | _room(segments, parts)
        if parts.loss:
            arrays["losses"] = _single(work.host_loss)
        _call(kernels.correct, arrays, sizes)
        return arrays

    def _read(self, tokens: Tokens) -> Named:
        target = self.correction.numerator == "target"
        numerator = tokens.target if target else tokens.proximal
        read = {"numerators": _single(numerator), "behaviors": _single(tokens.behavior)}
        if any(step.reads_advantages for step in self.correction.steps):
            read["advantages"] = _single(tokens.advantages)
        return read | {"masks": tokens.segments.mask.contiguous()}

    def _settled(self, tokens: Tokens, plan: Plan) -> Named:
        """What was decided for the optimizer step."""
        coupled = [plan.numbers[step] for step in self.correction.steps if step.is_coupled]
        settled = {"numbers": torch.stack(coupled).double()} if coupled else {}
        settled |= {} if tokens.ages is None else {"ages": tokens.ages.double().contiguous()}
        settled |= {} if plan.keep is None else {"groups": plan.keep.contiguous()}
        return settled | ({} if plan.scale is None else {"scales": _single(plan.scale)})

    def _outcome(self, tokens: Tokens, plan: Plan, found: Named, parts: Parts) -> Outcome:
        names = ("weights", "keeps", "finites", "log_ratios", "clippeds")
        scale = None if plan.scale is None else tokens.segments.spread(plan.scale)
        own = Outcome(*(found.get(name) for name in names), scale=scale)
        if not parts.observe:
            return own
        rows = dict(zip(needs_of(self.correction, parts), found["table"].unbind(), strict=True))
        seen = Sequences(*(rows[need] for need in OBSERVED), found["kepts"])
        return replace(own, acted=found["acteds"], sequences=seen)


def _library(text: str) -> ctypes.CDLL | None:
    try:
        return library(text)
    except BuildError as error:
        warnings.warn(f"{error}; this correction stays eager", RuntimeWarning, stacklevel=2)
        return None


def _single(values: Tensor) -> Tensor:
    return values.detach().to(torch.float32).contiguous()


def _pieces(segments: Segments) -> Named:
    """Where what this rank holds of its sequences begins and ends."""
    if segments.is_whole:
        return {"bounds": host_ints([0, *accumulate(segments.lengths)], segments.device)}
    owners, starts, stops, _ = zip(*segments.pieces, strict=True) if segments.pieces else ((), (), (), ())
    bounds = [0, *accumulate(stop - start for start, stop in zip(starts, stops, strict=True))]
    numbers = {"bounds": bounds, "owners": owners, "starts": starts}
    return {name: host_ints(values, segments.device) for name, values in numbers.items()}


def _room(segments: Segments, parts: Parts) -> Named:
    """Arrays to write to."""
    size = segments.size
    made = {
        "kepts": torch.empty(segments.count, dtype=torch.bool),
        "keeps": torch.empty(size, dtype=torch.bool),
    }
    floats = ("weights", "log_ratios") if parts.outcome else ()
    floats += ("factors", "products", "ratios", "bounded_ones", "rejected_ones") if parts.loss else ()
    made |= {name: torch.empty(size) for name in floats}
    if parts.outcome:
        made["finites"] = torch.empty(size, dtype=torch.bool)
    if parts.bounds:
        made["clippeds"] = torch.empty(size, dtype=torch.bool)
    if parts.outcome and parts.observe:
        made["acteds"] = torch.empty(size, dtype=torch.int32)
    return made if parts.layout is None else made | _sums(parts.layout)


def _sums(layout: Layout) -> Named:
    sizes = {"highest": len(HIGHEST), "log_sums": len(LOG_SUMS)}
    none = {name: torch.full((n,), -torch.inf, dtype=torch.float64) for name, n in sizes.items()}
    return none | {"sums": torch.zeros(layout.size, dtype=torch.float64)}


def _measured(found: Named) -> Measured:
    return Measured(found["sums"], found["highest"], found["log_sums"])


def _with_surrogate(measured: Measured, work: Work, outcome: Outcome, clipped: Tensor | None) -> Measured:
    """Adds where the surrogate clipped, which is known only once the loss is."""
    if clipped is not None:
        place = len(COLUMNS) + len(work.layout.flags)
        measured.sums[place : place + 1] = clipped.sum(dtype=torch.float64)
    return measured


def _call(function: ctypes._CFuncPtr, arrays: Named, sizes: tuple[int, ...]) -> None:
    addresses = [arrays[name].data_ptr() if name in arrays else None for name in ARRAYS]
    function((ctypes.c_void_p * len(ARRAYS))(*addresses), (ctypes.c_int64 * len(sizes))(*sizes))

"""The Triton backend: two kernels per correction, written from its steps by ``triton_text``."""

from __future__ import annotations

import importlib.util
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_ext.correction import OBSERVED, Correction, Outcome, Plan, Sequences, Tokens
from slime_ext.kernels.apply import (
    Applied,
    Eager,
    Weighted,
    Work,
    finish,
    measured_plainly,
    over_ranks,
    settled,
)
from slime_ext.kernels.chunks import Chunks
from slime_ext.kernels.triton_text import ROOM, source
from slime_ext.metrics.layout import BINS
from slime_ext.metrics.measure import measure
from slime_ext.objectives import Host
from slime_ext.ops.ratios import in_common

_written: dict[tuple[Correction, bool], ModuleType] = {}
_lock = threading.Lock()


def kernels_of(correction: Correction, *, observe: bool) -> ModuleType:
    """The compiled-on-demand kernels; Triton reads their source from a file of this process."""
    key = (correction, observe)
    with _lock:
        if key not in _written:
            folder = Path(tempfile.mkdtemp(prefix="slime_ext_"))
            path = folder / f"kernels_{len(_written)}.py"
            path.write_text(source(correction, observe=observe))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            _written[key] = module
        return _written[key]


@dataclass(frozen=True)
class Pass:
    """What the kernels of one call share."""

    kernels: ModuleType
    inputs: tuple[Tensor, ...]
    chunks: Chunks
    tokens: Tokens
    wide: torch.dtype
    observe: bool

    def launch(self, name: str, *arguments: Tensor | int, **constants: bool) -> None:
        """Runs a kernel, one program per chunk."""
        kernel = getattr(self.kernels, name)[(self.chunks.count,)]
        device = self.tokens.segments.device
        if device.type == "cuda":  # the eager path rounds after every operation; so must a comparison here
            constants["enable_fp_fusion"] = False
        with _on(device):
            kernel(*self.inputs, *arguments, WIDE=_wide(self.wide), LANES=self.chunks.lanes, **constants)


class Written(NamedTuple):
    """What pass two hands out beside the outcome."""

    product: Tensor
    ratio: Tensor
    clipped: Tensor
    rejected: Tensor
    histogram: Tensor


@dataclass(frozen=True, eq=False)
class Triton:
    """Pass one adds up chunks, a small reduction makes sequences of them, pass two decides and writes."""

    correction: Correction
    name: str = "triton"

    def outcome(
        self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False, bounds: bool = False
    ) -> Outcome:
        """As ``Correction.__call__``."""
        if not tokens.segments.size:
            return Eager(self.correction).outcome(tokens, plan, observe=observe, bounds=bounds)
        return self._both(tokens, settled(self.correction, tokens, plan), observe, observe or bounds)[0]

    def apply(self, work: Work) -> Applied:
        """As ``Eager.apply``; pass two also weights the host's loss and counts the histogram."""
        correction, observe = self.correction, work.layout is not None
        if not work.tokens.segments.size:
            return Eager(correction).apply(work)
        if not (work.acts and isinstance(correction.surrogate, Host)) or correction.is_identity:
            outcome = self.outcome(work.tokens, work.plan, observe=observe, bounds=True)
            return finish(correction, outcome, work, measured_plainly)
        plan = settled(correction, work.tokens, work.plan)
        outcome, written = self._both(work.tokens, plan, observe, True, work.host_loss.detach())
        measured = None
        if observe:
            histogram = written.histogram[:BINS].double()
            measured = measure(work.tokens, outcome, work.layout, first=work.first, histogram=histogram)
        loss = Weighted.apply(work.host_loss, written.product, outcome.factor, outcome.keep)
        return Applied(loss, outcome.keep, (written.ratio, written.clipped, written.rejected), measured)

    def _both(
        self, tokens: Tokens, plan: Plan, observe: bool, acts: bool, loss: Tensor | None = None
    ) -> tuple[Outcome, Written | None]:
        chunks = Chunks.of(tokens.segments.local_lengths, tokens.segments.device)
        inputs, wide = self._inputs(tokens, chunks)
        kernels = kernels_of(self.correction, observe=observe)
        shared = Pass(kernels, inputs, chunks, tokens, wide, observe)
        return self._correct(shared, self._table(shared), plan, acts, loss)

    def _inputs(self, tokens: Tokens, chunks: Chunks) -> tuple[tuple[Tensor, ...], torch.dtype]:
        target = self.correction.numerator == "target"
        numerator = (tokens.target if target else tokens.proximal).detach()
        behavior, mask = tokens.behavior.detach(), tokens.segments.mask.view(torch.uint8)
        advantages = behavior if tokens.advantages is None else tokens.advantages.detach()
        both = in_common(numerator[:0], behavior[:0])
        places = (chunks.owners, chunks.begins, chunks.sizes)
        return (numerator, behavior, mask, advantages, *places), both[0].dtype

    def _table(self, shared: Pass) -> Tensor:
        """[K, S] float64, the sums over every sequence on all ranks."""
        segments, chunks = shared.tokens.segments, shared.chunks
        needs, device = self.correction.needs(observe=shared.observe), segments.device
        if not needs:
            return torch.empty(0, dtype=torch.float64, device=device)
        partials = torch.empty((len(needs), chunks.count), dtype=torch.float64, device=device)
        shared.launch("statistics", partials, chunks.count)
        rows = torch.arange(len(needs), device=device).unsqueeze(1) * chunks.count
        offsets = torch.cat([(chunks.offsets[:-1] + rows).view(-1), chunks.offsets[-1:] * len(needs)])
        flat = torch.segment_reduce(partials.view(-1), "sum", offsets=offsets, unsafe=True, initial=0)
        return over_ranks(flat.view(len(needs), -1), segments.all_sum)

    def _settled(self, shared: Pass, plan: Plan, table: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        """Numbers of coupled steps, ages and the plan's keep; what is not there may be any tensor."""
        coupled = [plan.numbers[step] for step in self.correction.steps if step.is_coupled]
        ages = table if shared.tokens.ages is None else shared.tokens.ages
        groups = keep if plan.keep is None else plan.keep.view(torch.uint8)
        return torch.stack(coupled) if coupled else table, ages, groups

    def _correct(
        self, shared: Pass, table: Tensor, plan: Plan, acts: bool, loss: Tensor | None
    ) -> tuple[Outcome, Written | None]:
        segments, observe = shared.tokens.segments, shared.observe
        mask = segments.mask
        weights, log_ratio = (mask.new_empty(segments.size, dtype=shared.wide) for _ in range(2))
        keep, finite, clipped = (torch.empty_like(mask) for _ in range(3))
        acted = torch.empty_like(mask, dtype=torch.int32)
        kept = mask.new_empty(segments.count)
        written = None if loss is None else _room(mask, loss)
        shared.launch(
            "correct",
            *(table, segments.count, *self._settled(shared, plan, table, keep)),
            *(weights, keep, finite, log_ratio, kept, clipped, acted),
            *_rest(weights, loss, plan, written),
            GROUPS=plan.keep is not None,
            ACTS=acts,
            LOSS=written is not None,
            SCALED=plan.scale is not None,
            HISTOGRAM=written is not None and observe,
        )
        scale = None if plan.scale is None else segments.spread(plan.scale)
        own = (weights, keep, finite, log_ratio)
        if not observe:
            return Outcome(*own, clipped if acts else None, scale=scale), written
        known = dict(zip(self.correction.needs(observe=True), table.unbind(), strict=True))
        log_ratios, counts = (known[need] for need in OBSERVED)
        return Outcome(*own, clipped, acted, Sequences(log_ratios, counts, kept), scale), written


def _rest(any_: Tensor, loss: Tensor | None, plan: Plan, written: Written | None) -> tuple[Tensor, ...]:
    """The last pointers of ``correct``; those that it will not follow may point anywhere."""
    scale = any_ if plan.scale is None else plan.scale
    return (any_, scale, *[any_] * 5) if written is None else (loss, scale, *written)


def _room(mask: Tensor, loss: Tensor) -> Written:
    channel = (torch.empty_like(mask, dtype=torch.float32) for _ in range(3))
    return Written(torch.empty_like(loss), *channel, mask.new_zeros(ROOM, dtype=torch.int32))


def _on(device: torch.device) -> AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _wide(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float64 if dtype is torch.float64 else tl.float32

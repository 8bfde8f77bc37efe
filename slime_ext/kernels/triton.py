"""The Triton backend: two kernels per correction, written from its steps by ``slime_ext.kernels.source``."""

from __future__ import annotations

import importlib.util
import tempfile
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from slime_ext.correction import OBSERVED, Correction, Outcome, Plan, Sequences, Tokens
from slime_ext.kernels.apply import Applied, Eager, Work, finish, measured_plainly, settled
from slime_ext.kernels.chunks import Chunks
from slime_ext.kernels.source import source
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
            path.write_text(_text(correction, observe))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            _written[key] = module
        return _written[key]


def _text(correction: Correction, observe: bool) -> str:
    group = 1 << (len(correction.steps) + 1)
    return source(correction, observe=observe).replace("GROUP_BIT", str(group))


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
        plan = settled(self.correction, tokens, plan)
        kernels = kernels_of(self.correction, observe=observe)
        chunks = Chunks.of(tokens.segments.local_lengths, tokens.segments.device)
        inputs, wide = self._inputs(tokens, chunks)
        table = self._table(kernels, inputs, wide, tokens, chunks, observe=observe)
        return self._correct(
            kernels, inputs, wide, tokens, chunks, table, plan, observe=observe, bounds=bounds
        )

    def apply(self, work: Work) -> Applied:
        """As ``Eager.apply``."""
        outcome = self.outcome(work.tokens, work.plan, observe=work.layout is not None, bounds=True)
        return finish(self.correction, outcome, work, measured_plainly)

    def _inputs(self, tokens: Tokens, chunks: Chunks) -> tuple[tuple[Tensor, ...], torch.dtype]:
        target = self.correction.numerator == "target"
        numerator = (tokens.target if target else tokens.proximal).detach()
        behavior, mask = tokens.behavior.detach(), tokens.segments.mask.view(torch.uint8)
        advantages = behavior if tokens.advantages is None else tokens.advantages.detach()
        both = in_common(numerator[:0], behavior[:0])
        places = (chunks.owners, chunks.begins, chunks.sizes)
        return (numerator, behavior, mask, advantages, *places), both[0].dtype

    def _table(
        self,
        kernels: ModuleType,
        inputs: tuple[Tensor, ...],
        wide: torch.dtype,
        tokens: Tokens,
        chunks: Chunks,
        *,
        observe: bool,
    ) -> Tensor:
        """[K, S] float64, the sums over every sequence on all ranks."""
        needs, device = self.correction.needs(observe=observe), tokens.segments.device
        if not needs:
            return torch.empty(0, dtype=torch.float64, device=device)
        partials = torch.empty((len(needs), chunks.count), dtype=torch.float64, device=device)
        with _on(device):
            kernels.statistics[(chunks.count,)](
                *inputs, partials, chunks.count, WIDE=_wide(wide), LANES=chunks.lanes
            )
        rows = torch.arange(len(needs), device=device).unsqueeze(1) * chunks.count
        offsets = torch.cat([(chunks.offsets[:-1] + rows).view(-1), chunks.offsets[-1:] * len(needs)])
        flat = torch.segment_reduce(partials.view(-1), "sum", offsets=offsets, unsafe=True, initial=0)
        return tokens.segments.all_sum(flat.view(len(needs), -1))

    def _correct(
        self,
        kernels: ModuleType,
        inputs: tuple[Tensor, ...],
        wide: torch.dtype,
        tokens: Tokens,
        chunks: Chunks,
        table: Tensor,
        plan: Plan,
        *,
        observe: bool,
        bounds: bool,
    ) -> Outcome:
        segments = tokens.segments
        weights, log_ratio = (inputs[0].new_empty(segments.size, dtype=wide) for _ in range(2))
        keep, finite, clipped = (torch.empty_like(segments.mask) for _ in range(3))
        acted = torch.empty_like(keep, dtype=torch.int32)
        kept = keep.new_empty(segments.count)
        coupled = [plan.numbers[step] for step in self.correction.steps if step.is_coupled]
        numbers = torch.stack(coupled) if coupled else table
        ages = table if tokens.ages is None else tokens.ages
        groups = inputs[2] if plan.keep is None else plan.keep.view(torch.uint8)
        with _on(segments.device):
            kernels.correct[(chunks.count,)](
                *(*inputs, table, segments.count, numbers, ages, groups),
                *(weights, keep, finite, log_ratio, kept, clipped, acted),
                WIDE=_wide(wide),
                LANES=chunks.lanes,
                GROUPS=plan.keep is not None,
                ACTS=observe or bounds,
            )
        scale = None if plan.scale is None else segments.spread(plan.scale)
        own = (weights, keep, finite, log_ratio)
        if not observe:
            return Outcome(*own, clipped if bounds else None, scale=scale)
        known = dict(zip(self.correction.needs(observe=True), table.unbind(), strict=True))
        log_ratios, counts = (known[need] for need in OBSERVED)
        return Outcome(*own, clipped, acted, Sequences(log_ratios, counts, kept), scale)


def _on(device: torch.device) -> AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _wide(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return tl.float64 if dtype is torch.float64 else tl.float32

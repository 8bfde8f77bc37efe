"""Compares the log-probs of sampler and trainer bit for bit (``--expect exact``).

Both are compared in float32, as a loss reads them. 0.0 and -0.0 are equal. A value that is
no log-prob, such as NaN or -inf, is not equal to anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import field

import torch
from torch import Tensor

from slime_ext.core.metrics.layout import CURVES, POSITIONS
from slime_ext.tools.analysis.document import Exact, FirstDifference, PartOfRun
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import Additive, count_true, zeros

SIDES = ("sampler", "trainer")
COARSE = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LABELS = CURVES["by_position"]


class Exactness(Additive):
    """A collector (see ``pipeline``) of the tokens whose two log-probs differ.

    Args:
        by_rollout: [2] number of response tokens and of differing ones, by rollout.
        by_position: [bins, 2] the same by position in the response.
        fits: dtype and side -> number of compared tokens whose log-prob the dtype holds exactly.
        rounded: dtype and side -> number of differing tokens at which that side is the other one, rounded.
        firsts: the first differing token of each rollout.
        compared: number of tokens with both log-probs.
        apart: number of compared tokens that differ.
        largest: the largest |l| of a compared token in each part of a rollout, nats.
    """

    by_rollout: dict[int, Tensor] = field(default_factory=dict)
    by_position: Tensor = field(default_factory=lambda: zeros(len(LABELS), 2))
    fits: Counter[tuple[str, str]] = field(default_factory=Counter)
    rounded: Counter[tuple[str, str]] = field(default_factory=Counter)
    compared: int = 0
    apart: int = 0
    firsts: list[FirstDifference] = field(default_factory=list)
    largest: list[float] = field(default_factory=list)

    def add(self, rollout: DumpedRollout) -> None:
        """Adds a rollout, or several that are joined."""
        for one in rollout.rollouts:
            self._add(one)

    def _add(self, rollout: DumpedRollout) -> None:
        """Adds a rollout, part by part."""
        first: FirstDifference | None = None
        for part in rollout.parts():
            differs = part.mask & (~part.finite | (part.behavior != part.proximal))
            first = first or _first(part, differs)
            self._count(part, differs)
        self.firsts += [first] if first else []

    def _count(self, part: DumpedRollout, differs: Tensor) -> None:
        flags = torch.stack([part.mask, differs])
        numbers = flags.sum(1).double()
        self.by_rollout[part.rollout_id] = self.by_rollout.get(part.rollout_id, zeros(2)) + numbers
        bins = torch.bucketize(part.segments.within, torch.tensor(POSITIONS), right=True)
        self.by_position += torch.stack(
            [torch.bincount(bins[row], minlength=len(LABELS)) for row in flags], 1
        ).double()
        apart = differs & part.finite
        self.compared += count_true(part.finite)
        self.apart += count_true(apart)
        self.largest.append(float(part.log_ratio.abs().max()) if part.size else 0.0)
        values = dict(zip(SIDES, (part.behavior, part.proximal), strict=True))
        for (side, log_probs), other in zip(values.items(), reversed([*values.values()]), strict=True):
            for name, dtype in COARSE.items():
                fits = part.finite & (log_probs.to(dtype).float() == log_probs)
                is_rounded = apart & (other.to(dtype).float() == log_probs)
                self.fits[name, side] += count_true(fits)
                self.rounded[name, side] += count_true(is_rounded)

    def merge(self, other: Exactness) -> None:
        """Adds the counts of other rollouts."""
        rollouts, self.by_rollout = self.by_rollout, {}
        super().merge(other)
        self.by_rollout = rollouts
        for rollout, numbers in other.by_rollout.items():
            self.by_rollout[rollout] = self.by_rollout.get(rollout, zeros(2)) + numbers

    def comparison(self) -> Exact:
        """Returns the comparison for the document."""
        tokens, differing = (int(n) for n in sum(self.by_rollout.values(), zeros(2)).tolist())
        return Exact(
            tokens=tokens,
            differing=differing,
            largest=max(self.largest, default=0.0),
            first=min(self.firsts, key=lambda f: (f.rollout_id, f.position, f.token), default=None),
            by_rollout=tuple(_parts((str(k), self.by_rollout[k]) for k in sorted(self.by_rollout))),
            by_position=tuple(_parts(zip(LABELS, self.by_position, strict=True))),
            precision=self._precision() if self.apart else "",
        )

    def _precision(self) -> str:
        """Returns which side lost digits, if the digits show it."""
        for name in COARSE:
            coarse = [side for side in SIDES if self.fits[name, side] == self.compared]
            if len(coarse) == 1:
                (side,) = coarse
                (other,) = set(SIDES) - {side}
                is_rounded = self.rounded[name, side] == self.apart
                more = f", each that of the {other} rounded" if is_rounded else ""
                return (
                    f"all log-probs of the {side} are {name} numbers{more}; those of the {other} have more "
                    f"digits: the {side} computes or stores them in {name}"
                )
            if coarse:
                return f"both sides have equally few digits: all their log-probs are {name} numbers"
        return "both sides have more digits than bfloat16 and float16, so neither rounded to those"


def _first(part: DumpedRollout, differs: Tensor) -> FirstDifference | None:
    """Returns the first token that differs, in the order of the samples."""
    if not differs.any():
        return None
    at = int(differs.int().argmax())
    values = torch.stack([part.behavior[at], part.proximal[at]])
    bits = values.view(torch.int32).tolist()
    return FirstDifference(
        rollout_id=part.rollout_id,
        position=part.positions[int(part.segments.ids[at])],
        token=int(part.segments.within[at]),
        sampler=float(values[0]).hex(),
        trainer=float(values[1]).hex(),
        bits=((bits[0] ^ bits[1]) & 0xFFFFFFFF).bit_count(),
    )


def _parts(rows: Iterator[tuple[str, Tensor]]) -> Iterator[PartOfRun]:
    for label, numbers in rows:
        tokens, differing = (int(n) for n in numbers.tolist())
        if tokens:
            yield PartOfRun(label=label, tokens=tokens, differing=differing)

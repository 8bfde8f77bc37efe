"""The finding ``off_by_one``."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Margin, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import Explained, explained_by_rest, whole_run
from slime_ext.tools.analysis.detectors.shared.padded import Padded
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.shifts import CLOSER, SHIFT_TOKENS, SHIFTS, aligned, shifts_of
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import selection, zeros


class Shifts(Measure):
    """The sums of each shift, [SHIFTS, 4], and the number of sequences that it explains, [SHIFTS].

    ``k3`` sums k3 over the tokens that still have a log-prob after the shift is undone: as recorded, and
    undone, [2].
    """

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    sums: Tensor = field(default_factory=lambda: zeros(len(SHIFTS), 4))
    sequences: Tensor = field(default_factory=lambda: zeros(len(SHIFTS)))
    k3: Tensor = field(default_factory=lambda: zeros(2))

    def add(self, part: DumpedRollout) -> None:
        tested = shifts_of(part)
        for sums in tested.sums:
            self.sums += sums
        self.sequences += tested.explained.sum(1)
        back = aligned(part, tested.shifts) if tested.shifts.any() else part
        sides = part.columns[-1], back.columns[-1], part.finite & back.finite
        for near, undone, both in zip(*map(part.by_rollout, sides), strict=True):
            recorded = selection(near, both).sum()
            self.k3 += torch.stack([recorded, recorded if back is part else selection(undone, both).sum()])


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    after=("positive_log_probs", "retokenised"),
    what="the engine's log-probs belong to the token before or after, in all responses or in some",
    asks="50 tokens",
    title="""
        {% if sequences %}In some responses the{% else %}The{% endif %} sampler's log-probs are shifted by
        {{ shift | abs }} token{{ "s" if shift | abs > 1 }}.
    """,
    evidence="""
        {% set side = "before" if shift < 0 else "after" -%} {% if sequences -%} In {{ sequences | int
        }} of {{ every | int }} sequences ({{ sequences | share(every) }}), the trainer's log-prob of a
        token fits the one recorded {{ shift | abs }} token{{ "s" if shift | abs > 1 }} {{ side }} it: the
        distance is less than half of that to the one recorded for it.
        {%- else -%} The trainer's log-prob of a token differs by {{ here | nats }} from the one
        recorded for it, and by only {{ distance | nats }} from the one recorded {{ shift | abs }}
        token{{ "s" if shift | abs > 1 }} {{ side }} it. {%- endif %}
    """,
    threshold="""
        the distance at the shifted position is less than half of that without a shift, of all tokens, or in
        2 sequences and 2% of them
    """,
    ruled_out="Other weights or another text, because they fit no better at any other position.",
    fix="""
        Check how prompt and response are sliced: the logits at t - 1 make the log-prob of token t. In
        a custom generate function, append output_token_logprobs unchanged and in the order of the
        tokens, with 0 at tool tokens. If only some responses are shifted, check continued, aborted
        and multi-turn ones.
    """,
)

SHIFTED_SEQUENCES, SHIFTED_SHARE = 2, 0.02  # sequences that are shifted while others are not; their share


def look(d: Diagnosis) -> Figures | None:
    """Finds log-probs of the sampler that are shifted by one or two tokens."""
    need_tokens(d, SHIFT_TOKENS)
    fits = [
        (shifted / count, min(at, beside) / count, shift)
        for shift, (count, shifted, at, beside) in zip(SHIFTS, d.of(Shifts).sums.tolist(), strict=True)
        if count >= SHIFT_TOKENS
    ]
    distance, here, best = min(fits, default=(0.0, 0.0, 0))
    if distance < CLOSER * here:
        figures = {"sequences": 0, "shift": best, "here": here, "distance": distance}
        return figures | {"margin": _margin(d, distance, here), "explains": _explains(d)}
    sequences, best = max(
        zip(d.of(Shifts).sequences.tolist(), SHIFTS, strict=True)
    )  # each compared separately
    every = d.sums.sequences
    cut, shifted = d.of(Padded).fit, float(d.of(Shifts).sequences.sum())
    if cut is not None and cut.short * every > shifted * d.sums.finite:
        return None  # more samples are shifted, by more tokens, as permuted_log_probs says
    least = max(SHIFTED_SEQUENCES, SHIFTED_SHARE * every)
    if sequences < least:
        return None
    margin = Margin(sequences, math.sqrt(sequences), least)  # the error of a count of independent sequences
    return {
        "sequences": sequences,
        "shift": best,
        "every": every,
        "margin": margin,
        "explains": _explains(d),
    }


def _margin(d: Diagnosis, distance: float, here: float) -> Margin:
    """Returns the margin of mean |l| above the limit that the distance at the shifted place sets.

    Both means are over the same samples, so each is known about as well, relatively, as mean |l| of the run.
    """
    mean = d.means.absolute
    limit = distance / CLOSER
    return Margin(here, math.hypot(here, limit) * mean.error / mean.value, limit)


def _explains(d: Diagnosis) -> Explained:
    """Returns the share of k3 that goes with the shift; the ends of responses count as the rest of them."""
    (recorded, undone), (_, whole) = d.of(Shifts).k3.tolist(), whole_run(d)
    return explained_by_rest(d, whole, whole * undone / recorded if recorded else whole)

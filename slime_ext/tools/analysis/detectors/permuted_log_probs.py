"""The finding ``permuted_log_probs``."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.exchanged import Exchanged
from slime_ext.tools.analysis.detectors.shared.explained import (
    explained_by_order,
    explained_by_tokens,
)
from slime_ext.tools.analysis.detectors.shared.layouts import LAYOUTS, Layouts
from slime_ext.tools.analysis.detectors.shared.padded import SIDES, SIZES, Padded
from slime_ext.tools.analysis.detectors.shared.unrelated import LEAST, TRIED, Unrelated, relation_of
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros

# Tokens of a window; tokens of a sample in which windows are searched; mean nats per token by which a far
# window is off and unsure; share of its distance that may remain at another position.
WINDOW, LONGEST, DOUBT, ELSEWHERE = 6, 512, 0.3, 0.2


class Windows(Measure):
    """Number of far windows in unrelated samples, and of those that fit elsewhere in their sample, [2]."""

    takes_joined: ClassVar[bool] = True

    counts: Tensor = field(default_factory=lambda: zeros(2))

    def add(self, part: DumpedRollout) -> None:
        if relation_of(part).unrelated.any():
            for one in part.rollouts:
                self.counts += _moved(one, relation_of(one).unrelated.nonzero()[:TRIED, 0])


def _moved(part: DumpedRollout, which: Tensor) -> Tensor:
    """Returns the counts of ``Windows`` for some samples, [2]."""
    lengths = part.response_lengths
    begins = lengths.cumsum(0) - lengths
    counts = zeros(2)
    for sample in which.tolist():
        at = slice(int(begins[sample]), int(begins[sample]) + min(part.lengths[sample], LONGEST))
        b, p = (x[at][part.finite[at]].double().clamp(min=LEAST) for x in (part.behavior, part.proximal))
        if len(b) < 2 * WINDOW:
            continue
        sampler_windows, trainer_windows = (x.unfold(0, WINDOW, 1) for x in (b, p))
        apart = torch.cdist(trainer_windows, sampler_windows, p=1)
        in_place, best = apart.diagonal(), apart.amin(1)
        is_far = (in_place > DOUBT * WINDOW) & (trainer_windows.sum(1) < -DOUBT * WINDOW)
        fits = is_far & (best < ELSEWHERE * in_place)
        counts += torch.stack([is_far.sum(), fits.sum()])
    return counts


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="parts",
    after=("spoilt", "other_log_probs", "other_run"),
    what="""
        log-probs belong to another position of the same response: a long shift, chunks in the wrong order,
        a cut from the end of padded rows
    """,
    asks="samples of 12 tokens",
    title="""
        {% if batch %}The {{ side }}'s log-probs were cut from the end of rows that are padded to the longest
        of {{ batch }}. {%- elif layout %}The trainer's log-probs are in another order than their tokens: {{
        held }} context-parallel chunks were joined as {{ joined }} ones. {%- else %} Stretches of the
        log-probs are at the wrong position of their response: chunks in the wrong order, or a shift of
        several tokens.{% endif %}
    """,
    evidence="""
        {% if batch -%} If each response is moved back by the padding of its row (the longest of {{ batch
        }}, minus its own length), {{ moved | int }} tokens fit: k3 is {{ after | nats }} there instead of
        {{ before | nats }}. {%- elif layout -%} Put back in order (context-parallel size {{ layout.cp }},
        over each {{ text }}: {{ held }} chunks that were joined as {{ joined }} ones), the log-probs of
        {{ fits | int }} of {{ tried }} micro-batches fit their tokens: k3 is {{ after | nats }} instead
        of {{ before | nats }}. {%- else -%} In {{ unrelated }} of {{ samples }} samples, the two sides'
        log-probs do not follow each other token by token. In these, {{ windows | int }} stretches of {{
        size }} tokens are far off. {{ fits | share(windows) }} of them fit the other side's log-probs
        elsewhere in the same sample, with less than a fifth of the distance.{% endif %}
    """,
    threshold="""
        a layout of context parallelism puts 60% of the far micro-batches back in order, with a fifth of the
        distance; or a cut from the end of rows that are padded to the longest of 2 to 32 neighbours, or of a
        micro-batch, explains 12 far tokens, of whose distance a fifth remains; or a tenth of the samples has
        no correlation between both sides, and half of at least 20 far stretches in them fit at another
        position
    """,
    ruled_out="""
        Another text, old weights or noise, because none of them has the same log-probs in the same order
        elsewhere. A shift by one or two tokens was looked for first.
    """,
    fix="""
        {% if batch -%} Take the values of a response where it begins in its row, not from its end,
        where the padding is (verl-project/verl#2368). Until then, use batches of one sample. {%- elif layout
        -%} Compare the layout in which the batch is cut with the one in which log-probs are
        gathered: slime cuts each sample into zigzag chunks (cp_utils), and contiguous chunks over the whole
        micro-batch with --allgather-cp. {%- else -%} Check how chunks of context-parallel ranks (zigzag or
        in order), of micro-batches or of a packed batch are joined, and undo the order in which the tokens
        were cut.{% endif %} {%- if not batch %} Compare one sample with --context-parallel-size 1.{% endif %}
    """,
)
WINDOWS, SOME, SHARE = 20, 0.5, 0.1  # stretches; share that fits elsewhere; share of the samples
NAMES = {True: "contiguous", False: "zigzag"}


def look(d: Diagnosis) -> Figures | None:
    """Finds log-probs that fit in another order of their micro-batch, or elsewhere in their sample."""
    if cut := _cut(d):
        return cut
    layouts = d.of(Layouts)
    index = layouts.fit
    if index is None:
        return _elsewhere(d)
    layout, (count, tokens, before, gone, _) = LAYOUTS[index], layouts.sums[index].tolist()
    return {
        "batch": "",
        "layout": layout,
        "text": f"{layout.text} and its prompt" if layout.text == "sample" else layout.text,
        "held": NAMES[layout.is_contiguous],
        "joined": NAMES[not layout.is_contiguous],
        "fits": count,
        "tried": layouts.tried,
        "before": before / tokens,
        "after": (before - gone) / tokens,
        "explains": explained_by_order(layouts.sums[index], layouts.far * count / layouts.tried, d.rollouts),
    }


def _cut(d: Diagnosis) -> Figures | None:
    """Returns the figures if log-probs were cut from the end of padded rows."""
    cut = d.of(Padded).fit
    if cut is None:
        return None
    size = SIZES[cut.size]
    return {
        "batch": f"{size} neighbouring samples" if size else "the micro-batch or rollout",
        "side": SIDES[cut.side],
        "layout": None,
        "moved": cut.tokens,
        "before": cut.before / cut.tokens,
        "after": cut.after / cut.tokens,
        "explains": explained_by_tokens(d, cut.short, cut.far),
    }


def _elsewhere(d: Diagnosis) -> Figures | None:
    """Returns the figures if stretches of log-probs fit at other positions of the same sample."""
    samples = d.of(Unrelated)
    need(samples.correlated, "samples of 12 tokens")
    windows, fits = d.of(Windows).counts.tolist()
    is_some = samples.unrelated >= SHARE * samples.correlated
    if not is_some or windows < WINDOWS or fits < SOME * windows:
        return None
    return {
        "batch": "",
        "layout": None,
        "unrelated": samples.unrelated,
        "samples": samples.correlated,
        "windows": windows,
        "fits": fits,
        "size": WINDOW,
        "explains": explained_by_tokens(d, *d.of(Exchanged).far[:2].tolist()),
    }

"""The finding ``prefix_mismatch``."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.ops.segments import as_bytes
from slime_ext.tools.analysis.detectors.shared.ages import older_are_far, starts_near
from slime_ext.tools.analysis.detectors.shared.along import explained_along
from slime_ext.tools.analysis.detectors.shared.certainty import add_by_surprise, beyond_certainty
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.layers import layer_apart
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import is_above, run_begins, zeros

NEAR = 8  # first tokens of a turn that count as its start
PARTS = ("start of the first turn", "rest of the first turn", "start of later turns", "rest of later turns")


class PartsOfTurns(Measure):
    """Sums by part of a turn (PARTS) and bin of -log behavior, [PARTS, SURPRISES, 4]."""

    takes_joined: ClassVar[bool] = True
    version: ClassVar[int] = 2

    table: Tensor = field(default_factory=lambda: zeros(len(PARTS), SURPRISES, 4))

    def add(self, part: DumpedRollout) -> None:
        begins = run_begins(part.segments.turn_ids).numpy()
        starts = numpy.diff(begins, append=part.size).clip(max=NEAR)  # tokens of the start of each turn
        is_rest = numpy.ones(part.size, dtype=numpy.uint8)
        shifts = begins - (starts.cumsum() - starts)
        is_rest[shifts.repeat(starts) + numpy.arange(starts.sum())] = 0
        places = 2 * as_bytes(is_above(part.turns, 0)) + torch.from_numpy(is_rest)
        add_by_surprise(self.table, places, part)


DETECTOR = Detector(
    severity="error",
    side="honest",
    group="prefixes",
    after=(
        "spoilt",
        "stale_prefix",
        "packing_leak",
        "other_log_probs",
        "permuted_log_probs",
        "part_of_run",
        "minimum_length",
        "shared_place",
        "experts",
    ),
    what="the trainer scores the start of a turn after another text than the engine sampled it after",
    asks="60 tokens at starts",
    title="""
        {%- if or_else is defined %} The start of {{ "later turns" if is_later else "the responses" }} is
        further off than what follows, but rollout 0 is much nearer. {%- else %} The trainer scores the start
        of {{ "later turns" if is_later else "the responses" }} after another text than the engine sampled it
        after. {%- endif %}
    """,
    evidence="""
        Mean |log-ratio| {{ near | nats }} over the first {{ tokens }} tokens, {{ far | nats }} {{ "in
        the first turn" if is_later else "after them" }}: {{ (near / [far, 1e-12] | max) | factor }}
        {%- if after is not none %}, {{ after | nats }} further on in these turns{% endif %}.
    """,
    threshold="""
        3 times the distance elsewhere, 0.05 nats more, by 6 standard errors, and 1.7 times that of
        equally certain tokens
    """,
    ruled_out="""
        Tokens that are less certain there, because equally certain ones are {{ as_sure | factor }} as
        far off as elsewhere. Errors that add up along the response, because {{ "in the first turn" if
        is_later else "after these tokens" }} the distance is only {{ far | nats }}.
    """,
    remedy="look for a chat template that drops a turn, a missing BOS or a prompt that one side cut",
    fix="""
        Compare the ids of the engine's request with the ids before this position in the sample. Usual
        causes are a chat template that drops earlier reasoning, a missing BOS, a tool's answer that
        was cut or tokenised differently, and a prompt that was truncated on one side. Keep the ids of
        earlier turns unchanged.
    """,
)

FEWEST = 60  # tokens
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3
# Mean |l| at the start of a turn over that elsewhere; nats more; standard errors.
TIMES, MATTERS, SURE = 3.0, 0.05, 6.0
EQUALLY_CERTAIN = 1.7  # the same ratio among equally certain tokens
UNTOLD = Untold(
    "which weights sampled the start of the responses",
    "record the weight version of each token (a sample that was begun before a push may have the version at "
    "its end), or finish all responses before one push",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds turns whose first tokens are several times as far off as other tokens.

    The first tokens of later turns are compared with the first turn. Without later turns, the first tokens of
    responses are compared with the rest of their first turn. The difference must remain among equally certain
    tokens.
    """
    tables = d.of(PartsOfTurns).table
    begin, rest, later, after = tables.sum(1).tolist()
    is_enough = min(begin[0] + rest[0], max(later[0], begin[0])) >= FEWEST
    need(is_enough, f"{FEWEST} tokens at the start of turns")
    is_later = later[0] >= FEWEST
    here, there = (tables[2], tables[0] + tables[1]) if is_later else (tables[0], tables[1])
    begin, other = here.sum(0).tolist(), there.sum(0).tolist()
    if min(begin[0], other[0]) < FEWEST:
        return None
    near, far = begin[1] / begin[0], other[1] / other[0]
    error = math.sqrt(begin[2]) / begin[0]
    if near < max(TIMES * far, far + MATTERS, far + SURE * error):
        return None
    apart = older_are_far(d)
    if apart and apart.fresh.k3 <= AGREES:  # old weights explain it
        return None
    if layer_apart(d):  # outputs differ over the same text as well
        return None
    as_sure = beyond_certainty(here, there)
    if as_sure < EQUALLY_CERTAIN:  # the start of a turn is only less certain
        return None
    further = after[1] / after[0] if is_later and after[0] else None
    if is_later:
        explains = explained_by_tokens(d, later[0] + after[0], later[3] + after[3])
    else:
        explains = explained_along(d, grows=False)
    figures = {
        "near": near,
        "far": far,
        "after": further,
        "is_later": is_later,
        "tokens": NEAR,
        "as_sure": as_sure,
        "explains": explains,
    }
    # Another text acts from rollout 0 on. Responses that were begun with old weights need a push.
    return figures | {"or_else": ("stale_weights",), "untold": (UNTOLD,)} if starts_near(d) else figures

"""The finding ``shared_place``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.ages import Lag, lag
from slime_ext.tools.analysis.detectors.shared.chunk_edges import chunk_edges
from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.detectors.shared.detector import (
    Detector,
    Figures,
    Margin,
    Untold,
    need_tokens,
)
from slime_ext.tools.analysis.detectors.shared.ends import Ends
from slime_ext.tools.analysis.detectors.shared.explained import Explained, explained_by_tokens
from slime_ext.tools.analysis.measures.curves import PER_OCTAVE, POSITIONS, octaves_of_places
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import tabulated, zeros
from slime_ext.tools.analysis.values import integers

FEWEST, TOKENS = 300, 4  # tokens in all; tokens at the places
# Share of sum l^2, of first tokens also of k3; times mean |l| elsewhere; nats of mean |l|.
HELD, TIMES, MATTERS = 0.8, 5.0, 0.1
MOST, MOST_SHARE = 15, 0.5  # tokens at one end, and their share of all tokens
# Share of the tokens with others at their place from the start, from which on these tell an end from a
# position; share of a response, below which a position is at its end only by coincidence.
COVERED, COINCIDENCE = 0.5, 0.1
LONGER = Untold(
    "whether longer responses are far off at the same positions",
    "sample one rollout with a higher limit of length (if the far tokens stay, it is a position)",
)
FOLLOWING = Untold(
    "whether the tokens after the first are off for the same reason",
    "compare the ids of the engine's request with those before the response in the sample",
)
ALONE = 8.0  # far tokens that are equally far off, or more that are not
# Mean |l| of the outermost two such tokens, and of the next, over the mean of all of them. After another
# prompt, first tokens are far off as well, but less and less; a stretch in the middle leaves the first token.
EDGE, GONE = 0.5, 0.25


class FirstTokens(Measure):
    """Sums of ``clipped`` by place from the start of the response, up to MOST, [MOST + 1, COLUMNS]."""

    takes_joined: ClassVar[bool] = True

    sums: Tensor = field(default_factory=lambda: zeros(MOST + 1, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if part.size:
            place = part.segments.within.clamp(max=MOST + 1)
            part.tabulate(self.sums, place, clipped(part))


class EndsByPlace(Measure):
    """Sums over the last MOST tokens of responses by their place from the end and from the start.

    Args:
        table: [2, MOST, POSITIONS, 2] number of tokens and sum |l|. The first is of responses that ended by
            themselves, the second of those that were cut at the limit.
    """

    table: Tensor = field(default_factory=lambda: zeros(2, MOST, POSITIONS, 2))

    def add(self, part: DumpedRollout) -> None:
        if not part.size:
            return
        lengths, from_end = part.response_lengths.numpy()[:, None], numpy.arange(MOST)
        is_there = from_end < lengths
        at = torch.from_numpy((part.segments.bounds.numpy()[1:, None] - 1 - from_end)[is_there])
        cut = integers([status == "truncated" for status in part.statuses or [""] * part.count]).numpy()
        row = torch.from_numpy((cut[:, None] * MOST + from_end)[is_there])
        index = row * POSITIONS + octaves_of_places(part)[at].long().clamp(max=POSITIONS - 1)
        rows = [column.index_select(0, at) for column in part.columns[:2]]
        self.table += tabulated(index, rows, 2 * MOST * POSITIONS).view_as(self.table)


DETECTOR = Detector(
    severity="error",
    side="either",  # values that were filled in alter the record, a lost token leaves it honest
    group="parts",
    after=("spoilt", "kept_mass", "other_log_probs", "permuted_log_probs"),
    what="only the first or last tokens of responses, or the first of context-parallel chunks, are far off",
    asks="300 tokens",
    title="""
        {% if chunks is defined -%} Only the first tokens of context-parallel chunks are far off ({{ chunks }}
        chunks of each sequence). {%- elif or_else is defined and is_first -%} The first {{ places if places
        > 1 else "" }} token{{ "s" if places > 1 }} of responses {{ "are" if places > 1 else "is" }} much
        further off than the others. {%- elif or_else is defined -%} The last {{ places }} tokens of {{
        "responses that were cut at the limit" if is_cut else "responses" }} are far off, and no other
        response has tokens at their positions. {%- else -%} Only the {{ "first" if is_first else "last" }}
        {{ places if places > 1 else "" }} token{{ "s" if places > 1 }} of {{ "responses that were cut at the
        limit" if is_cut else "responses" }} {{ "are" if places > 1 else "is" }} far off.{% endif %}
    """,
    evidence="""
        {{ held | share(1) }} of the squared log-ratio lies at {{ tokens | share(of) }} of the tokens:
        mean |log-ratio| {{ near | nats }} there, {{ rest | nats }} at all others. {%- if is_cut %}
        Responses that ended by themselves agree at the end.{% endif %}
    """,
    threshold="""
        the first or last 1 to 15 tokens are at most half of all tokens, hold 80% of the squared log-ratio,
        are 5 times as far off as the others, and as others at the same places from the start, and are 0.1
        nats off; first tokens have a sharp edge. The first
        tokens of 2 to 16 equal chunks of the sequences are at most 35% of all tokens, with the same limits
    """,
    ruled_out="""
        {% if chunks is defined -%} Another text or noise, because they do not depend on how the trainer cuts
        a sequence, and all other tokens agree. {%- else -%} Routing or noise, because they do not depend on
        where a response ends. A shift of the whole response, because the tokens before agree.{% endif %}
    """,
    remedy="""
        compare what begins or ends a response: a lost first entry, an appended end token, trimmed stop
        strings, the last chunk of a stream
    """,
    fix="""
        {%- if chunks is defined %} Roll the labels before the sequence is split over ranks: the last position
        of a chunk predicts the first token of the next chunk, which another rank holds. As a test, score one
        batch with --context-parallel-size 1. {%- elif is_first %} Compare the first id of a few answers
        with the engine's output, and the number of log-probs with completion_tokens: a list that begins one
        place late, after a retract or a chunked prefill, lacks its first entry. {%- elif is_cut %} Drop these
        tokens' log-probs, or turn speculative decoding off, because engines with multi-token prediction have
        returned wrong log-probs for the last tokens before max_model_len (vllm-project/vllm#38711). {%- else
        %} Check what ends a response: an end or stop token that is appended by hand, stop strings that are
        trimmed, the last chunk of a stream. Mask what the engine did not sample. {%- endif %} {%- if chunks
        is not defined and not is_first %} As a test, sample one rollout with a higher limit of length and
        without speculative decoding.{% endif %}
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds how many first or last tokens of responses, or which edges of chunks, hold the distance."""
    need_tokens(d, FEWEST)
    if edges := chunk_edges(d):
        explains = explained_by_tokens(d, edges.tokens, edges.k3)
        figures = {"of": d.of(Ends).total[0].item(), "is_first": False, "is_cut": False}
        margin = _margin(edges.tokens, edges.near, edges.squared, edges.rest)
        return edges._asdict() | figures | {"margin": margin, "explains": explains}
    whole = d.of(Ends).total
    for table, is_cut, is_first in _tables(d) if whole[3] else ():
        places = _places(table, whole, is_first=is_first)
        if not places:
            continue
        count, _, absolute, squared, k3 = table[:places].sum(0).tolist()
        explains = explained_by_tokens(d, count, k3)
        of_end = _after_first(explains) if is_first else _elsewhere(d, places, is_cut=is_cut)
        if of_end is None:
            continue
        near = absolute / count
        rest = float(whole[2] - absolute) / max(float(whole[0]) - count, 1)
        return {
            **of_end,
            "places": places,
            "is_cut": is_cut,
            "is_first": is_first,
            "held": squared / float(whole[3]),
            "tokens": count,
            "of": float(whole[0]),
            "near": near,
            "rest": rest,
            "margin": _margin(count, near, squared, rest),
            "explains": explains,
        }
    return None


def _tables(d: Diagnosis) -> Iterator[tuple[Tensor, bool, bool]]:
    """Yields sums by place from one end, whether they are of cut responses alone, and of first tokens."""
    ends = d.of(Ends).sums
    if float(ends[0, :, 0].sum()):
        yield ends[1], True, False
    yield ends.sum(0), False, False
    if lag(d) is not Lag.EXPLAINS:  # the first tokens may change most
        yield d.of(FirstTokens).sums, False, True


def _after_first(explains: Explained) -> Figures | None:
    """Returns the other causes of far first tokens; None if the tokens after them hold too much of k3.

    A lost entry leaves all others as they are. After another prompt, first tokens are the furthest off, and
    many small distances follow them.
    """
    if explains.share < HELD:
        return None
    return {} if explains.is_rest_healthy else {"or_else": ("prefix_mismatch",), "untold": (FOLLOWING,)}


def _elsewhere(d: Diagnosis, places: int, *, is_cut: bool) -> Figures | None:
    """Returns the other causes of far last tokens; None if the place from the start is the cause.

    What acts from a position on also acts there in longer responses, so last tokens are compared with others
    at the same places from the start. If all responses end at one limit, there are no others.
    """
    table = d.of(EndsByPlace).table
    near = (table[1] if is_cut else table.sum(0))[:places].sum(0)
    every = torch.stack([d.curves.position.count, d.curves.position.absolute], 1)
    others = (every - near).clamp_min(0)
    known = (others[:, 0] > 0) & (near[:, 0] > 0)
    count, size, usual = near[known, 0], near[known, 1] / near[known, 0], others[known, 1] / others[known, 0]
    if float(count.sum()) >= COVERED * float(near[:, 0].sum()):
        # A bin in which far tokens begin holds near ones as well, so most of the bins have to agree.
        is_far = size >= TIMES * usual
        return {} if float(count[is_far].sum()) >= COVERED * float(count.sum()) else None
    last = float(near.nonzero()[-1, 0])
    length = 2 ** (last / PER_OCTAVE)
    if places <= COINCIDENCE * length:
        return {}
    return {"or_else": ("position_drift", "kv_precision"), "untold": (LONGER,)}


def _margin(count: float, near: float, squared: float, rest: float) -> Margin:
    """Returns the margin of mean |l| at the places, which are of different responses and so independent."""
    error = math.sqrt(max(squared / count - near**2, 0.0) / count)
    return Margin(near, error, max(MATTERS, TIMES * rest))


def _places(table: Tensor, whole: Tensor, *, is_first: bool) -> int:
    """Returns the number of places that two means of |l| explain best, if they hold the distance; else 0.

    Args:
        table: [places, COLUMNS] sums by place from one end.
        whole: [COLUMNS] sums over all tokens.
    """
    until = table[:MOST].cumsum(0)
    count, absolute, squared = until[:, 0], until[:, 2], until[:, 3]
    others = (whole[0] - count).clamp_min(1)
    near, rest = absolute / count.clamp_min(1), (whole[2] - absolute) / others
    # Of responses of a few tokens, every token is one of the last.
    is_place = (count >= TOKENS) & (count <= MOST_SHARE * whole[0]) & (squared >= HELD * whole[3])
    is_place &= (near >= MATTERS) & (near >= TIMES * rest)
    is_place &= (count * near).square() >= ALONE * squared  # not a few of the tokens at the places
    if not is_place.any():
        return 0
    explained = torch.where(is_place, count * others / (count + others) * (near - rest).square(), -1)
    at = int(explained.argmax())
    first, last, then = (table[[0, at, at + 1], 2] / table[[0, at, at + 1], 0].clamp_min(1)).tolist()
    is_sharp = min(first, last) >= EDGE * near[at] and then <= GONE * near[at]
    return at + 1 if is_sharp or not is_first else 0

"""The finding ``minimum_length``."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import field

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.ages import Lag, lag
from slime_ext.tools.analysis.detectors.shared.along import Positions
from slime_ext.tools.analysis.detectors.shared.chunk_edges import chunk_edges
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.signs import Signs
from slime_ext.tools.analysis.measures.curves import PER_OCTAVE
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout

KINDS = 16  # last tokens of a part that are counted


class Endings(Measure):
    """Responses by their last token: its id, how many end with it, and the length of the shortest of them."""

    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, part: DumpedRollout) -> None:
        lengths = part.response_lengths
        long = lengths > 0
        if part.tokens is None or not long.any():
            return
        last, lengths = part.tokens[(lengths.cumsum(0) - 1)[long]], lengths[long]
        ids, index, counts = last.unique(return_inverse=True, return_counts=True)
        shortest = torch.full_like(ids, int(lengths.max())).scatter_reduce(0, index, lengths, "amin")
        for at in counts.topk(min(KINDS, len(counts))).indices.tolist():
            self.rows.append((int(ids[at]), int(counts[at]), int(shortest[at])))

    @property
    def shortest(self) -> int:
        """The length of the shortest response that ends with the most frequent last token; 0: unknown."""
        counts: Counter[int] = Counter()
        for token, count, _ in self.rows:
            counts[token] += count
        end = max(counts, key=counts.__getitem__, default=None)
        return min((length for token, _, length in self.rows if token == end), default=0)


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="other_policy",
    after=(
        "spoilt",
        "kept_mass",
        "constrained_decoding",
        "other_log_probs",
        "permuted_log_probs",
    ),
    what="the sampler may not end a response before a number of tokens (min_new_tokens), and renormalises",
    asks="300 tokens",
    title="""
        The sampler may not end a response before about {{ begin | int }} tokens (min_new_tokens),
        which the trainer does not know.
    """,
    evidence="""
        The mean log-ratio is {{ "%.3g" | format(near) }} nats up to there and {{ "%.2g" |
        format(rest) }} from there on, because up to there the sampler renormalises without the end
        token. No response {% if stopped %}that ends with the usual last token {% endif %}is shorter than {{
        shortest | int }} tokens. {%- if stopped %} Shorter ones ({{ stopped | int }} tokens) end with another
        token, as after a stop string, which still ends an answer below the minimum in SGLang.{% endif %}
    """,
    threshold="""
        mean log-ratio 5 times as far below 0 before the position as after it, by 6 standard errors;
        95% of the squared log-ratio of far tokens is below 0; no response with the usual last token
        ends before the position, and at most half of all; old weights do not explain the distance
    """,
    ruled_out="""
        Top-p or a temperature, because they do not stop at a position. Another text at the start,
        because its log-ratio has no preferred sign.
    """,
    fix="""
        Remove min_new_tokens (min_tokens) from sampling_params, or mask the end token at these
        positions in the trainer.
    """,
)
FEWEST, TOKENS = 300, 50  # tokens in all; on each side of the position
MATTERS, SURE = 3e-3, 6.0  # nats of mean l; standard errors
LARGEST = 1.5  # nats of mean l that masking one likely token makes; a grammar makes more
TIMES, LOUDER = 5.0, 4.0  # mean l and mean l^2 before the position, over those after it
BESIDE, KEEPS, GONE = 3, 0.4, 0.25  # bins; share of -mean l that remains up to the position, and after it
MOST = 0.5  # share of the tokens in responses that end otherwise
LEANS = 0.95  # share of the squared log-ratio of far tokens that is below 0


def look(d: Diagnosis) -> Figures | None:
    """Finds a position before which mean l is below 0 and no response ends.

    Old weights look the same if the first tokens change most, but they leave fresh tokens alone.
    """
    need_tokens(d, FEWEST)
    if lag(d) is Lag.EXPLAINS or chunk_edges(d):
        return None
    table, lengths = d.curves.position.table, d.curves.length.count
    below, above = d.of(Signs).far[:, 3].tolist()
    if not lengths.sum() or below < LEANS * (below + above):
        return None
    first, stopped = _first_end(d)
    whole, until, best = table.sum(0), table.cumsum(0), None
    for cut in table[:, 0].nonzero()[1:, 0].tolist():
        near, rest = until[cut - 1].tolist(), (whole - until[cut - 1]).tolist()
        explained = _step(near, rest) if _is_sharp(table, cut, near) else None
        if explained is not None and cut <= first + 1 and (best is None or explained > best[0]):
            best = explained, cut, near, rest
    if best is None:
        return None
    _, cut, near, rest = best
    return {
        "explains": explained_by_tokens(d, near[0], float(d.of(Positions).table[:cut, :, 3].sum())),
        "begin": 2 ** (cut / 4) - 1,
        "near": near[3] / near[0],
        "rest": rest[3] / rest[0],
        "leans": below / (below + above) if below + above else 1.0,
        "shortest": 2 ** (first / 4) - 1,
        "stopped": stopped,
    }


def _first_end(d: Diagnosis) -> tuple[int, float]:
    """Returns the bin of the shortest response that ends by itself, and the tokens of shorter ones.

    A stop string ends a response below the minimum, but the end token, which the minimum bans, does not.
    """
    lengths = d.curves.length.count
    first = int(lengths.nonzero()[0, 0])
    end = int(math.log2(1 + d.of(Endings).shortest) * PER_OCTAVE)
    shorter = float(lengths[:end].sum())
    return (end, shorter) if end > first and shorter <= MOST * float(lengths.sum()) else (first, 0.0)


def _is_sharp(table: Tensor, cut: int, near: list[float]) -> bool:
    """Returns whether mean l is below 0 up to the position, and near 0 after it.

    After another text it would fade instead.
    """
    last, then = table[cut - BESIDE : cut].sum(0).tolist(), table[cut : cut + BESIDE].sum(0).tolist()
    if not last[0] or not then[0]:
        return False
    lean = -last[3] / last[0]
    return lean >= KEEPS * -near[3] / near[0] and abs(then[3] / then[0]) <= GONE * lean


def _step(near: list[float], rest: list[float]) -> float | None:
    """Returns the sum of squares that two means explain; None unless mean l is below 0 only before."""
    (n, _, squared, signed, _), (m, _, other, usual, _) = near, rest
    if min(n, m) < TOKENS:
        return None
    lean, level = -signed / n, abs(usual / m)
    if lean > LARGEST or lean < max(MATTERS, TIMES * level) or signed > -SURE * squared**0.5:
        return None
    return n * m / (n + m) * (lean - level) ** 2 if squared / n >= LOUDER * other / m else None

"""The finding ``minimum_length``."""

from __future__ import annotations

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="other_policy",
    after=(
        "spoilt",
        "kept_mass",
        "constrained_decoding",
        "other_log_probs",
    ),
    what="the sampler may not end before a number of tokens (min_new_tokens), and renormalises",
    asks="300 tokens",
    title="""
        The sampler may not end before about {{ begin | int }} tokens (min_new_tokens), which the
        trainer does not know.
    """,
    evidence="""
        Up to there the log-ratio is {{ "%.3g" | format(near) }} nats on average, {{ "%.2g" |
        format(rest) }} from there on: what is left is renormalised without the end token. No response
        is shorter than {{ shortest | int }} tokens.
    """,
    threshold="""
        a mean log-ratio 5 times below that behind the place, by 6 standard errors; 95% of what is far
        below 0; no response that ends before
    """,
    ruled_out="""
        Top-p or a temperature: they do not stop at a place. Another text at the start: it has no
        preferred sign.
    """,
    fix="""
        Remove min_new_tokens (min_tokens) from sampling_params, or have the trainer mask the end token
        at these places.
    """,
)
FEWEST, TOKENS = 300, 50  # tokens, and on each side of the place
MATTERS, SURE = 3e-3, 6.0  # nats of mean l; standard errors
TIMES, LOUDER = 5.0, 4.0  # mean l, mean l^2 before the place over that behind it
BESIDE, KEEPS, GONE = 3, 0.4, 0.25  # bins; of the lean before; of the lean just before
LEANS = 0.95  # of the squared log-ratio of far tokens, below 0


def look(d: Diagnosis) -> Figures | None:
    """Finds a place before which l leans below 0 and behind which it does not, and no response ends."""
    need_tokens(d, FEWEST)
    table, lengths = d.curves.tables["position"], d.curves.column("length", "count")
    below, above = d.statistics.shared.signs[:, 3].tolist()
    if not lengths.sum() or below < LEANS * (below + above):
        return None
    first = int(lengths.nonzero()[0, 0])
    whole, until, best = table.sum(0), table.cumsum(0), None
    for cut in table[:, 0].nonzero()[1:, 0].tolist():
        near, rest = until[cut - 1].tolist(), (whole - until[cut - 1]).tolist()
        found = _step(near, rest) if _is_sharp(table, cut, near) else None
        if found is not None and cut <= first + 1 and (best is None or found > best[0]):
            best = found, cut, near, rest
    if best is None:
        return None
    _, cut, near, rest = best
    return {
        "begin": 2 ** (cut / 4) - 1,
        "near": near[3] / near[0],
        "rest": rest[3] / rest[0],
        "leans": below / (below + above) if below + above else 1.0,
        "shortest": 2 ** (first / 4) - 1,
    }


def _is_sharp(table: Tensor, cut: int, near: list[float]) -> bool:
    """Whether the lean goes on up to the place and is gone behind it: another text fades instead."""
    last, then = table[cut - BESIDE : cut].sum(0).tolist(), table[cut : cut + BESIDE].sum(0).tolist()
    if not last[0] or not then[0]:
        return False
    lean = -last[3] / last[0]
    return lean >= KEEPS * -near[3] / near[0] and abs(then[3] / then[0]) <= GONE * lean


def _step(near: list[float], rest: list[float]) -> float | None:
    """The squares that a lean before a place explains; None where there is none, or one behind it too."""
    (n, _, squared, signed, _), (m, _, other, usual, _) = near, rest
    if min(n, m) < TOKENS:
        return None
    lean, level = -signed / n, abs(usual / m)
    if lean < max(MATTERS, TIMES * level) or signed > -SURE * squared**0.5:
        return None
    return n * m / (n + m) * (lean - level) ** 2 if squared / n >= LOUDER * other / m else None

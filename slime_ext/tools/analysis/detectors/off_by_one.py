"""The finding ``off_by_one``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.shifts import CLOSER, SHIFT_TOKENS, SHIFTS

DETECTOR = Detector(
    severity="error",
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
        }} of {{ every | int }} sequences ({{ sequences | share(every) }}), each compared separately,
        the trainer's log-probs are less than half as far from those recorded {{ shift | abs }}
        token{{ "s" if shift | abs > 1 }} {{ side }} theirs as from those recorded for their token.
        {%- else -%} The trainer's log-prob of a token differs by {{ here | nats }} from the one
        recorded for it, and by only {{ distance | nats }} from the one recorded {{ shift | abs }}
        token{{ "s" if shift | abs > 1 }} {{ side }} it. {%- endif %}
    """,
    threshold="the distance at the shifted position is less than half of that without a shift",
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
        for shift, (count, shifted, at, beside) in zip(SHIFTS, d.statistics.shifts.tolist(), strict=True)
        if count >= SHIFT_TOKENS
    ]
    distance, here, best = min(fits, default=(0.0, 0.0, 0))
    if distance < CLOSER * here:
        return {"sequences": 0, "shift": best, "here": here, "distance": distance}
    sequences, best = max(zip(d.statistics.shifted.tolist(), SHIFTS, strict=True))  # each compared separately
    every = d.sums["sequences"]
    if sequences < max(SHIFTED_SEQUENCES, SHIFTED_SHARE * every):
        return None
    return {"sequences": sequences, "shift": best, "every": every}

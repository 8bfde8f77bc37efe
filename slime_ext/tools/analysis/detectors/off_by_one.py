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
        {% set side = "before" if shift < 0 else "after" -%} {% if sequences -%} In {{ sequences | int }}
        of {{ every | int }} sequences ({{ sequences | share(every) }}), each looked at by itself, the
        trainer's log-probs are less than half as far from those recorded {{ shift | abs }} {{ side }}
        their token as from those recorded for it. {%- else -%} The trainer's log-prob of a token differs
        by {{ here | nats }} from the one recorded for it, by only {{ distance | nats }} from the one
        recorded {{ shift | abs }} {{ side }} it. {%- endif %}
    """,
    threshold="less than half the distance at another place as at its own",
    ruled_out="Other weights or another text: those are no closer at any other place.",
    fix="""
        Check what is cut off where prompt and response meet: the log-prob of token t is made by the
        logits at t - 1. In a custom generate function, take output_token_logprobs as it comes and append
        it in the order of the tokens, tool tokens included (as 0). Where only some responses are shifted:
        continued, aborted and multi-turn ones.
    """,
)

SHIFTED_SEQUENCES, SHIFTED_SHARE = 2, 0.02  # sequences that are shifted when others are not, and their share


def look(d: Diagnosis) -> Figures | None:
    """Finds behavior log-probs that fit the token one or two places away better than their own, over all
    tokens or in some of the sequences."""
    need_tokens(d, SHIFT_TOKENS)
    found = [
        (shifted / count, min(at, beside) / count, shift)
        for shift, (count, shifted, at, beside) in zip(SHIFTS, d.statistics.shifts.tolist(), strict=True)
        if count >= SHIFT_TOKENS
    ]
    distance, here, best = min(found, default=(0.0, 0.0, 0))
    if distance < CLOSER * here:
        return {"sequences": 0, "shift": best, "here": here, "distance": distance}
    sequences, best = max(zip(d.statistics.shifted.tolist(), SHIFTS, strict=True))  # each looked at by itself
    every = d.sums["sequences"]
    if sequences < max(SHIFTED_SEQUENCES, SHIFTED_SHARE * every):
        return None
    return {"sequences": sequences, "shift": best, "every": every}

"""The finding ``prompt_cut``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.along import along
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.parts import far_value
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    after=(
        "spoilt",
        "other_policy",
        "prefixes",
        "parts",
        "pushes",
        "experts",
        "expert_routing",
        "stale_weights",
        "stale_cache",
        "layer",
        "some_prompts",
    ),
    what="the two sides see different prompts: one is cut, or lacks a part",
    asks="300 tokens",
    title="""
        {%- if value %} Only samples with a prompt of {{ value }} are far off: one side does not see all
        of it. {%- else %} The two sides see different prompts: the distance falls along the response.{%
        endif %}
    """,
    evidence="""
        {%- if value %} k3 {{ mine.k3 | nats }} in these {{ mine.samples }} samples, {{ others.k3 |
        nats }} in the {{ others.samples }} with other prompts ({{ "%.0f" | format([z, 999] | min)
        }} standard errors of log k3 over samples). {%- else %} Mean |log-ratio| {{ early | nats }}
        in the first quarter of the tokens by position, {{ middle | nats }} in the middle, {{ late |
        nats }} in the last.{% endif %}
    """,
    threshold="""
        k3 4 times that of samples with other prompts, by 4 standard errors of log k3; or the first
        quarter of the tokens twice the last, 0.05 nats, falling between, and 1.4 times that of
        tokens as certain
    """,
    ruled_out="""
        Errors that add up along a text: they grow. Noise and old weights: they do not depend on the place.
    """,
    fix="""
        Compare the ids of the engine's request with those of the sample before the response: a limit of
        the engine (--context-length, truncation) or of the trainer (--rollout-max-prompt-len), a system
        prompt or a chat template that one side lacks, a BOS token.
    """,
)
UNTOLD = "which part of the text before the responses differs: compare the ids on both sides"
TOKENS, TIMES, MATTERS, SURE, EVENED = 300, 2.0, 0.05, 6.0, 1.4


def look(d: Diagnosis) -> Figures | None:
    """Finds that the length of the prompt tells far samples from the others, or that the distance falls."""
    need_tokens(d, TOKENS)
    if far := far_value(d, ("prompt length",)):
        return {**far._asdict(), "z": far.z}
    found = along(d)
    if found is None or not found.early >= found.middle >= found.late or d.statistics.top_share >= FEW:
        return None
    if found.early < max(MATTERS, TIMES * found.late) or found.first < EVENED * found.last:
        return None
    if found.early - found.late < SURE * found.early_error:
        return None
    figures = {"value": "", "early": found.early, "middle": found.middle, "late": found.late}
    return figures | {"or_else": ("prefix_mismatch",), "untold": UNTOLD}

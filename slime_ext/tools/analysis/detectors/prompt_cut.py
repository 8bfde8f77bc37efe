"""The finding ``prompt_cut``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.along import along, explained_along
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, Untold, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import K3, explained
from slime_ext.tools.analysis.detectors.shared.parts import far_value
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import top_share

DETECTOR = Detector(
    severity="error",
    side="honest",
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
        {%- if value %} Only samples with a prompt of {{ value }} are far off, because one side does not
        see all of it. {%- elif or_else is defined %} The distance falls along the response, as if both
        sides saw different text before it. {%- else %} The two sides see different prompts: the distance
        falls along the response.{% endif %}
    """,
    evidence="""
        {%- if value %} k3 is {{ far.k3 | nats }} in these {{ far.samples }} samples and {{
        others.k3 | nats }} in the {{ others.samples }} with other prompts ({{ "%.0f" | format([z,
        999] | min) }} standard errors of log k3 over samples). {%- else %} Mean |log-ratio| {{ early
        | nats }} in the first quarter of the tokens by position, {{ middle | nats }} in the middle,
        {{ late | nats }} in the last quarter.{% endif %}
    """,
    threshold="""
        k3 4 times that of samples with other prompts, by 4 standard errors of log k3; or mean
        |log-ratio| in the first quarter of the tokens is 0.05 nats and above that in the last by 6 standard
        errors, the middle is between, and it is 1.7 times that in the last among equally certain tokens, or
        1.4 times there and twice among all
    """,
    ruled_out="""
        Errors that add up along a text, because they grow. Noise or old weights, because they do not
        depend on the position.
    """,
    remedy="""
        look for a limit that cuts the prompt (--context-length, --rollout-max-prompt-len) and for a
        system prompt that one side lacks
    """,
    fix="""
        Compare the ids of the engine's request with those of the sample before the response. Usual
        causes are a limit of the engine (--context-length, truncation) or of the trainer
        (--rollout-max-prompt-len), a system prompt or a chat template that one side lacks, and a BOS
        token.
    """,
)
UNTOLD = Untold(
    "which part of the text before the responses differs",
    "compare the ids of the engine's request with those of the sample, for one sample",
)
# What a layer adds to its attention for every text, such as a sink, weighs less the longer the text is.
UNTOLD_LAYERS = Untold(
    "whether a layer differs that acts less on longer text",
    "record layer outputs of both sides (layers/trainer, layers/sampler)",
)
TOKENS, TIMES, MATTERS, SURE, EQUALLY_CERTAIN = 300, 2.0, 0.05, 6.0, 1.4
# Early mean |l| over late, among equally certain tokens. Other weights and lower precision act after any
# text: they make 0.9 to 1.6 in the runs of benchmarks/faults, and another prompt makes 1.9 to 3.4.
FALLS = 1.7


def look(d: Diagnosis) -> Figures | None:
    """Finds that far samples share a prompt length, or that the distance falls along the response."""
    need_tokens(d, TOKENS)
    if far := far_value(d, ("prompt length",)):
        both = (K3(*mean[1:]) for mean in (far.far, far.others))
        return {**far._asdict(), "z": far.z, "explains": explained(*both)}
    drift = along(d)
    if drift is None or not drift.early >= drift.middle >= drift.late or top_share(d.rollouts) >= FEW:
        return None
    # How certain tokens are may change along the response, so equally certain ones count most.
    falls = drift.first >= FALLS * drift.last
    falls |= drift.first >= EQUALLY_CERTAIN * drift.last and drift.early >= TIMES * drift.late
    if drift.early < MATTERS or not falls:
        return None
    if drift.early - drift.late < SURE * drift.early_error:
        return None
    explains = explained_along(d, grows=False)
    figures = {
        "value": "",
        "early": drift.early,
        "middle": drift.middle,
        "late": drift.late,
        "explains": explains,
    }
    if d.layers:
        return figures | {"or_else": ("prefix_mismatch",), "untold": (UNTOLD,)}
    return figures | {"or_else": ("prefix_mismatch", "layer"), "untold": (UNTOLD, UNTOLD_LAYERS)}

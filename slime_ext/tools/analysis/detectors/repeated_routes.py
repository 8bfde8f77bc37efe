"""The finding ``repeated_routes``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="experts",
    after=("spoilt",),
    what="the sampler's experts are one row that repeats over many tokens",
    asks="rollout_routed_experts",
    title="The recorded experts repeat: many tokens in a row have the same ones in all layers.",
    evidence="""
        In {{ repeated }} of {{ routed }} samples with experts ({{ repeated | share(routed) }}), over
        {{ (tokens / repeated) | int }} tokens on average{% if prompt == repeated %}, in the prompt alone
        {%- elif prompt %}; in {{ prompt }} of them in the prompt alone{% endif %}.
    """,
    threshold="""
        8 steps to another token keep the experts of every layer, 4 times as many as in the next
        longest such run of the sample; in 2 samples and 2% of all
    """,
    ruled_out="""
        Routing that flips: it changes single tokens, not one row for a block. Text that repeats one
        token, which is routed alike: only steps to another token count.
    """,
    fix="""
        Do not replay these experts: the trainer would take the wrong ones. Look at how the engine
        collects them where a prompt is prefilled in chunks or a buffer is used again
        (sgl-project/sglang#36404), update it, and sample one rollout with chunked prefill off
        (--sglang-chunked-prefill-size -1).
    """,
)
FEWEST, SHARE = 2, 0.02


def look(d: Diagnosis) -> Figures | None:
    """Finds samples with a long run of equal rows of experts."""
    counts = d.statistics.counts
    need(counts["routed"], "the sampler's experts (slime, miles: --use-rollout-routing-replay)")
    if counts["repeated"] < max(FEWEST, SHARE * counts["routed"]):
        return None
    return {
        "repeated": counts["repeated"],
        "routed": counts["routed"],
        "tokens": counts["repeated_tokens"],
        "prompt": counts["repeated_prompt"],
    }

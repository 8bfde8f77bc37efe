"""The finding ``repeated_routes``."""

from __future__ import annotations

from dataclasses import dataclass

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.experts import Routing
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout


@dataclass
class Rows(Measure):
    """Samples whose experts repeat, their tokens, and samples in which only the prompt has them."""

    samples: int = 0
    tokens: int = 0
    prompts: int = 0

    def close(self, rollout: DumpedRollout) -> None:
        self.samples += rollout.routing.get("repeated", 0)
        self.tokens += rollout.routing.get("repeated_tokens", 0)
        self.prompts += rollout.routing.get("repeated_prompt", 0)


DETECTOR = Detector(
    severity="error",
    side="either",  # the experts show it, whatever the log-probs are
    group="experts",
    after=("spoilt",),
    what="the sampler's recorded experts are the same row over many tokens",
    asks="rollout_routed_experts",
    title="The recorded experts repeat: many tokens in a row have the same ones in all layers.",
    evidence="""
        In {{ repeated }} of {{ routed }} samples with experts ({{ repeated | share(routed) }}), the
        same experts repeat over {{ (tokens / repeated) | int }} tokens on average{% if prompt ==
        repeated %}, only in the prompt {%- elif prompt %}; in {{ prompt }} of them only in the
        prompt{% endif %}.
    """,
    threshold="""
        in 2 samples and 2% of all, the experts of every layer stay the same at 8 steps to a different
        token in a row, and at 4 times as many as in the sample's next longest run
    """,
    ruled_out="""
        Routing that flips, because it changes single tokens, not one row for a block. Text that
        repeats one token and is therefore routed alike, because only steps to a different token
        count.
    """,
    fix="""
        Do not replay these experts, because the trainer would use the wrong ones. Check how the
        engine collects them if a prompt is prefilled in chunks or a buffer is reused
        (sgl-project/sglang#36404), and update the engine. As a test, sample one rollout with chunked
        prefill off (--sglang-chunked-prefill-size -1).
    """,
)
FEWEST, SHARE = 2, 0.02


def look(d: Diagnosis) -> Figures | None:
    """Finds samples with long runs of equal rows of experts."""
    routed, rows = d.of(Routing).routed, d.of(Rows)
    need(routed, "the sampler's experts (slime, miles: --use-rollout-routing-replay)")
    if rows.samples < max(FEWEST, SHARE * routed):
        return None
    return {"repeated": rows.samples, "routed": routed, "tokens": rows.tokens, "prompt": rows.prompts}

"""The finding ``some_prompts``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.kinds import whole_prompts
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    says="symptom",
    after=(
        "spoilt",
        "other_policy",
        "stale_prefix",
        "stale_cache",
        "stale_weights",
        "experts",
        "other_log_probs",
        "packing_leak",
        "part_of_run",
        "shared_place",
    ),
    what="all samples of some prompts are far off, and none of the others",
    asks="groups of samples, by prompt",
    title="All samples of {{ far }} of {{ prompts }} prompts are far off, and none of the others.",
    evidence="""
        k3 {{ k3 | nats }} in the samples of these prompts, {{ rest | nats }} in the others. {{
        mixed }} prompts have samples of both kinds; {{ "%.0f" | format(expected) }} would, if the
        kind did not depend on the prompt.
    """,
    threshold="""
        two kinds of samples, 5 times apart for their certainty, the others healthy; at most a quarter of
        the prompts of both kinds that chance makes, by 4 standard errors
    """,
    ruled_out="""
        What acts on single samples (a retry, a swap) or on a whole rollout (old weights, numerics): it
        does not keep to prompts.
    """,
    fix="""
        Compare the ids of the engine's request with those of the sample for one of these prompts,
        and look at what the prompts have in common: a source, a length, a special token, an image,
        a tool. {%- if untold is defined %} An engine that serves whole prompts looks the same.{%
        endif %}
    """,
)
UNTOLD = "the engine of each sample in sample.metadata"


def look(d: Diagnosis) -> Figures | None:
    """Finds that the samples of a prompt are near or far together."""
    samples = d.statistics.samples
    need(samples.groups, "prompts with several samples (group_index)")
    found = whole_prompts(d)
    if found is None:
        return None
    (_, n, rest), (_, m, k3) = found.kinds
    figures = {
        "far": found.far + found.mixed,
        "prompts": found.far + found.mixed + found.near,
        "mixed": found.mixed,
        "expected": found.expected,
        "k3": k3 / m,
        "rest": rest / n,
    }
    if "engine" in samples.by_label():
        return figures
    return figures | {"or_else": ("part_of_run", "prefix_mismatch"), "untold": UNTOLD}

"""The finding ``some_prompts``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.kinds import AGREES, Prompts, Sizes, whole_prompts
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="either",  # a symptom
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
        k3 is {{ k3 | nats }} in the samples of these prompts and {{ rest | nats }} in the others. {{
        mixed }} prompts have samples of both kinds. If the kind did not depend on the prompt, {{
        "%.0f" | format(expected) }} would.
    """,
    threshold="""
        two kinds of samples, 5.6 times apart relative to their certainty, of which the near ones are
        healthy; at most a quarter as many mixed prompts as by chance, by 4 standard errors
    """,
    ruled_out="""
        A cause that acts on single samples (a retry, a swap) or on a whole rollout (old weights,
        numerics), because it would not depend on the prompt.
    """,
    fix="""
        Compare the ids of the engine's request with those of the sample for one of these prompts.
        Check what the prompts have in common: a source, a length, a special token, an image, a tool.
    """,
)
CHANCE = 0.05  # that rollout 0 has none of the far prompts
UNTOLD = Untold("which engine served each prompt", "record the engine of each sample in sample.metadata")


def look(d: Diagnosis) -> Figures | None:
    """Finds that all samples of a prompt are near, or all are far."""
    samples = d.samples
    need(d.of(Sizes).groups, "prompts with several samples (group_index)")
    by_prompt = whole_prompts(d)
    if by_prompt is None:
        return None
    (_, n, rest), (_, m, k3) = by_prompt.kinds.near, by_prompt.kinds.far
    figures = {
        "far": by_prompt.far + by_prompt.mixed,
        "prompts": by_prompt.far + by_prompt.mixed + by_prompt.near,
        "mixed": by_prompt.mixed,
        "expected": by_prompt.expected,
        "k3": k3 / m,
        "rest": rest / n,
        "explains": explained_by_tokens(d, m, k3),
    }
    if "engine" in samples.by_label():
        return figures
    other = "stale_weights" if _begin_later(d, by_prompt) else "prefix_mismatch"
    return figures | {"or_else": ("part_of_run", other), "untold": (UNTOLD,)}


def _begin_later(d: Diagnosis, prompts: Prompts) -> bool:
    """Returns whether no prompt of rollout 0 is far off, which is no chance.

    Another text acts from rollout 0 on. Groups that were begun with old weights need a push.
    """
    first, each = d.rollouts[0], len(d.of(Sizes).groups)
    every = prompts.near + prompts.far + prompts.mixed
    by_chance = (1 - prompts.far / every) ** (every / each)
    return first.rollout_id == 0 and first.k3 <= AGREES and by_chance <= CHANCE

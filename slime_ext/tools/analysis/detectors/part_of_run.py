"""The finding ``part_of_run``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.ages import older_are_far
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.kinds import whole_prompts
from slime_ext.tools.analysis.detectors.shared.parts import far_value
from slime_ext.tools.analysis.measures.by_sample import LATER, SHAPES
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="parts",
    after=(
        "spoilt",
        "other_log_probs",
        "shared_place",
    ),
    what="only the samples of one engine, rank, status, version, length or number of turns are far off",
    asks="a label of the samples: engine, data-parallel rank, weight version, status, turns, length",
    title="""
        Only samples {{ of }} are far off{% if few %}, in rollout{{ "s" if rollouts | length > 1 }}
        {{ rollouts[:6] | join(", ") }}{{ ", ..." if rollouts | length > 6 }}{% endif %}.
    """,
    evidence="""
        k3 {{ mine.k3 | nats }} in these {{ mine.samples }} samples, {{ others.k3 | nats }} in the {{
        others.samples }} others of the same rollouts ({{ "%.0f" | format([z, 999] | min) }} standard
        errors of log k3 over samples{% if is_shape %}; of the first 16 tokens of each, which all
        samples have{% endif %}). They hold {{ held | share(1) }} of {% if is_shape %}k3 there{% else
        %}the run's k3{% endif %}.
    """,
    threshold="""
        k3 4 times that of the other samples of the same rollouts, by 4 standard errors of log k3, and
        3e-3 nats; 60% of the excess
    """,
    ruled_out="""
        What acts on every sample alike (numerics, a temperature, a lag of all engines): the others of
        the same rollouts agree.
    """,
    fix="{{ fix }}",
)
LABELS = ("engine", "data-parallel rank", "weight version", "status")
OF = {
    "engine": "of engine {}",
    "data-parallel rank": "of the trainer's data-parallel rank {}",
    "weight version": "of weight version {}",
    "status": "with status {}",
    "turns": "of {}",
    "response length": "with responses of {}",
}
FIX = {
    "engine": (
        "Restart or push to engine {value}, and look why it missed its weight update: a push that failed, a "
        "restart that loaded the base weights, another image or dtype."
    ),
    "data-parallel rank": (
        "Compare rank {value} of the trainer with another: weights after a load or a resume, its "
        "GPU, its share of the batch. Score one fixed text on each."
    ),
    "weight version": (
        "Find the engine that reports weight version {value} and push to it: other engines of the same "
        "rollouts agree with the trainer."
    ),
    "status": (
        "Look at how samples with status {value} come about: a continued or aborted request must keep the "
        "log-probs of each of its parts in order."
    ),
    "turns": (
        "Look at how samples of {value} are put together: the engine's request for their first turn against "
        "the ids of the sample, and the engine that serves them."
    ),
    "response length": (
        "Look at what depends on the length of a response of {value}: the engine or the queue that serves "
        "it, the trainer's micro-batch (--max-tokens-per-gpu), a kernel for long inputs."
    ),
}
UNNUMBERED = "without a number"


def look(d: Diagnosis) -> Figures | None:
    """Finds the label that tells far samples from the others."""
    samples = d.statistics.samples
    need(len(samples.by_label()) and samples.parts, "labels of the samples: engine, rank, version, status")
    found = far_value(d, LABELS)
    if found is None and not older_are_far(d) and not whole_prompts(d):
        found = far_value(d, SHAPES)
    if found is None or (found.label == "weight version" and found.value != UNNUMBERED):
        return None
    value = "that is no number (such as default)" if found.value == UNNUMBERED else found.value
    if found.label == "turns":
        value = f"{value}{' or more' if value == str(LATER) else ''} turn{'s' * (value != '1')}"
    return {
        **found._asdict(),
        "of": OF[found.label].format(value),
        "is_shape": found.label in SHAPES,
        "z": found.z,
        "few": len(found.rollouts) < len(d.timeline),
        "fix": FIX[found.label].format(value=value),
    }

"""The finding ``part_of_run``."""

from __future__ import annotations

from collections import defaultdict

from slime_ext.tools.analysis.detectors.shared.ages import older_are_far
from slime_ext.tools.analysis.detectors.shared.began import Began, began, dated
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import K3, explained
from slime_ext.tools.analysis.detectors.shared.kinds import whole_prompts
from slime_ext.tools.analysis.detectors.shared.parts import FarValue, far_value, mean_of
from slime_ext.tools.analysis.measures.by_sample import HEAD, LATER, SHAPES
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="either",  # whatever is wrong with a part
    group="parts",
    after=(
        "spoilt",
        "other_log_probs",
        "permuted_log_probs",
        "shared_place",
    ),
    what="only the samples of one engine, rank, status, version, length or number of turns are far off",
    asks="a label of the samples: engine, data-parallel rank, weight version, status, turns, length",
    title="""
        Only samples {{ of }} are far off{% if few %}, in rollout{{ "s" if rollouts | length > 1 }}
        {{ rollouts[:6] | join(", ") }}{{ ", ..." if rollouts | length > 6 }}{% endif %}.
    """,
    evidence="""
        k3 is {{ far.k3 | nats }} in these {{ far.samples }} samples and {{ others.k3 | nats }} in
        the {{ others.samples }} others of the same rollouts ({{ "%.0f" | format([z, 999] | min) }}
        standard errors of log k3 over samples{% if is_shape %}; over the first 16 tokens of each
        sample, which all samples have{% endif %}). They hold {{ held | share(1) }} of {% if is_shape
        %}k3 there{% else %}the run's k3{% endif %}.{{ dated }}
    """,
    threshold="""
        k3 4 times that of the other samples of the same rollouts, by 4 standard errors of log k3, and above
        5e-3 nats; the samples hold 60% of the excess and make half of k3 within 2 standard errors; if older
        tokens are further off, ranks are not compared. It is a warning if the others are not healthy
    """,
    ruled_out="""
        A cause that acts on every sample (numerics, a temperature, a lag of all engines), because the
        others of the same rollouts agree.
    """,
    remedy="push to the engine that serves these samples, or restart it",
    fix="{{ fix }}",
)
RANK = "data-parallel rank"
LABELS = ("engine", RANK, "weight version", "status")
OF = {
    "engine": "of engine {}",
    RANK: "of the trainer's data-parallel rank {}",
    "weight version": "of a weight version {}",
    "status": "with status {}",
    "turns": "of {}",
    "response length": "with responses of {}",
}
FIX = {
    "engine": (
        "Restart engine {value} or push to it, and find out why it missed its weight update. Usual causes "
        "are a push that failed, a restart that loaded the base weights, and another image or dtype."
    ),
    RANK: (
        "Compare rank {value} of the trainer with another rank: its weights after a load or a resume, its "
        "GPU, its share of the batch. Score one fixed text on each rank."
    ),
    "weight version": (
        "Find the engine that reports a version {value} and push to it, because other engines of the "
        "same rollouts agree with the trainer."
    ),
    "status": (
        "Check the code that makes samples with status {value}. A continued or aborted request must keep the "
        "log-probs of all its parts in order."
    ),
    "turns": (
        "Check how samples of {value} are put together. Compare the engine's request for their first turn "
        "with the ids of the sample, and find out which engine serves them."
    ),
    "response length": (
        "Check what depends on the length of a response of {value}: the engine or queue that serves it, the "
        "trainer's micro-batch (--max-tokens-per-gpu), a kernel for long inputs."
    ),
}
LONGEST = ("status", "truncated")
BEGINS = 0.5  # mean |l| of first tokens over that of all tokens of some samples
MOST, CERTAIN = 0.5, 2.0  # least share of k3 in the rollouts in question, within standard errors
UNNUMBERED = "without a number"
FEWEST = 2  # samples of a rollout, for an error of their k3


def look(d: Diagnosis) -> Figures | None:
    """Finds the label that separates the far samples from the others."""
    samples = d.samples
    need(len(samples.by_label()) and samples.parts, "labels of the samples: engine, rank, version, status")
    is_by_age = older_are_far(d)
    # Ranks are compared at one age only: a rank that got more old samples by chance is further off.
    far = far_value(d, [label for label in LABELS if not (is_by_age and label == RANK)])
    if far is None and not is_by_age and not whole_prompts(d):
        far = far_value(d, SHAPES)
    if far is None or (far.label == "weight version" and far.value != UNNUMBERED):
        return None
    if (far.label, far.value) == LONGEST and _begin_near(d, far):
        return None
    explains = explained(*(K3(*mean[1:]) for mean in (far.far, far.others)))
    if explains.share + CERTAIN * explains.error < MOST:
        return None
    value = "that is not a number (such as default)" if far.value == UNNUMBERED else far.value
    if far.label == "turns":
        value = f"{value}{' or more' if value == str(LATER) else ''} turn{'s' * (value != '1')}"
    return {
        "dated": dated(d, _began(d, far)),
        "explains": explains,
        **far._asdict(),
        "of": OF[far.label].format(value),
        "is_shape": far.label in SHAPES,
        "z": far.z,
        "few": len(far.rollouts) < len(d.timeline),
        "fix": FIX[far.label].format(value=value),
    }


def _begin_near(d: Diagnosis, far: FarValue) -> bool:
    """Returns whether the first tokens of far samples agree, even if all |l| there is theirs.

    Responses that were cut at the limit are the longest, so what acts from a place on acts on them alone. Of
    the longest, as many are counted as were cut, or all if those that were cut are shorter.
    """
    parts = [p for p in d.samples.parts if (p.label, p.value) == (far.label, far.value)]
    samples, tokens = sum(p.samples for p in parts), sum(p.tokens for p in parts)
    heads = defaultdict(list)  # of HEAD tokens each, by the length of the shortest response
    for part in d.samples.parts:
        if part.label == "response length":
            heads[int(part.value.split()[0])].append(part)
    count, absolute = 0, 0.0
    for shortest, those in sorted(heads.items(), reverse=True):
        count += sum(p.samples for p in those)
        absolute += sum(p.absolute for p in those)
        if count >= samples and tokens >= samples * shortest:
            break
    return absolute / (HEAD * samples) < BEGINS * sum(p.absolute for p in parts) / max(tokens, 1)


def _began(d: Diagnosis, far: FarValue) -> Began | None:
    """Returns in which rollout the samples of a value began to be far off."""
    rollouts = d.samples.by_label()[far.label]
    ids = [i for i in sorted(rollouts) if i <= far.rollouts[-1]]
    means = {i: mean_of([p for p in rollouts[i] if p.value == far.value]) for i in ids}
    known = [i for i in ids if means[i].samples >= FEWEST]
    return began(known, [means[i].k3 for i in known], [means[i].relative_error for i in known])

"""The finding ``advantages``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="""
        advantages do not follow from the rewards: flipped, one sample late, over other prompts'
        samples, 0 at a part of the tokens
    """,
    asks="advantages, rewards, groups",
    title="Advantages do not follow from the rewards: {{ said }}.",
    evidence="""
        In {{ count }} of {{ known }} rollouts {{ how }}.{% if estimator %} The run's estimator is {{
        estimator }}.{% endif %}
    """,
    threshold="""
        in half of the rollouts a correlation of 0.98 with that explanation, and not with the rewards of
        the prompt less their mean
    """,
    ruled_out="""
        An estimator that normalises otherwise: whatever it subtracts or divides by, within a prompt the
        better sample has the larger advantage.
    """,
    fix="{{ fix }}",
)
HALF = 0.5
UNSURE = ("batch", "unlike")  # what another estimator may make
BY_PROMPT = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
SAID = {
    "flipped": (
        "their sign is flipped",
        "within each prompt the better sample has the smaller advantage",
        "Look for a minus in the reward or in the post-process of advantages: a loss, a cost or a "
        "distance that is used as a reward.",
    ),
    "late": (
        "rewards come one sample late",
        "advantages fit the rewards of the sample before",
        "Look where rewards are gathered: a batch that is shifted by one (a queue, an index that "
        "begins at 1), or a reorder of samples between reward and training.",
    ),
    "early": (
        "rewards come one sample early",
        "advantages fit the rewards of the sample behind",
        "Look where rewards are gathered: a batch that is shifted by one, or a reorder of samples "
        "between reward and training.",
    ),
    "others": (
        "the baseline is over samples of other prompts",
        "advantages fit rewards less the mean of samples that are not those of the prompt",
        "Look at how samples are grouped: --n-samples-per-prompt against the real size of a group, "
        "and a shuffle or a filter between sampling and the advantages.",
    ),
    "batch": (
        "the baseline is over the whole batch",
        "advantages fit rewards less the mean of all samples",
        "The estimator takes the mean by prompt: look at how samples are grouped (group_index, "
        "--n-samples-per-prompt).",
    ),
    "partial": (
        "they are 0 at a part of the response tokens",
        "most samples have their advantage at some response tokens and 0 at others",
        "Look where an advantage is spread over tokens: the mask of the last turn, or of another sample. "
        "If these tokens are not meant to train, mask them: they count where the loss is averaged.",
    ),
    "unlike": (
        "they have nothing to do with them",
        "advantages follow neither the rewards of the prompt, nor a neighbour's, nor any chunk's",
        "Compare reward and advantage of a few samples by hand: the key of the reward, a reorder "
        "between reward and training, another run's rewards.",
    ),
}


def look(d: Diagnosis) -> Figures | None:
    """Finds the kind that most rollouts are of, if it is not that of the estimator."""
    found = {kind: rollouts for kind, rollouts in vars(d.statistics.estimators).items() if rollouts}
    known = sum(len(rollouts) for kind, rollouts in found.items() if kind not in ("zero", "flat"))
    need(known, "advantages, rewards and groups of the samples")
    estimator = str(d.flags.get("advantage_estimator") or "")
    kinds = {kind for kind in SAID if kind in found and (kind not in UNSURE or estimator in BY_PROMPT)}
    kind = max(kinds, key=lambda one: len(found[one]), default=None)
    if kind is None or len(found[kind]) < HALF * known:
        return None
    if kind == "unlike" and known < 2:  # of one rollout chance may make it
        return None
    said, how, fix = SAID[kind]
    return {
        "said": said,
        "how": how,
        "fix": fix,
        "count": len(found[kind]),
        "known": known,
        "estimator": estimator,
        "rollouts": tuple(sorted(found[kind])),
    }

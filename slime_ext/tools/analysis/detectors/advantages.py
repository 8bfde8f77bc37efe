"""The finding ``advantages``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    explains=False,
    what="""
        advantages do not follow from the rewards: NaN, wrong sign, shifted by one sample, baseline
        over other prompts, or 0 at a part of the tokens
    """,
    asks="advantages, rewards, groups",
    title="Advantages do not follow from the rewards: {{ said }}.",
    evidence="""
        In {{ count }} of {{ known }} rollouts {{ how }}.{% if estimator %} The run's estimator is {{
        estimator }}.{% endif %}
    """,
    threshold="""
        one token that is not finite; or in half of the rollouts the advantages have a correlation of
        0.98 with this explanation, and a lower one with the rewards minus the mean of their prompt
    """,
    ruled_out="""
        An estimator that normalises differently, because under every estimator the better sample of a
        prompt has the larger advantage.
    """,
    fix="{{ fix }}",
)
HALF = 0.5
UNSURE = ("batch", "unlike")  # kinds that are right for another estimator
BY_PROMPT = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
NAN = "nan"
SAID = {
    NAN: (
        "they are NaN or infinite",
        "response tokens have an advantage that is NaN or infinite, so the loss is, too",
        "Look for a NaN reward, and for a group whose rewards are all equal and are divided by their "
        "standard deviation.",
    ),
    "flipped": (
        "their sign is flipped",
        "within each prompt the better sample has the smaller advantage",
        "Look for a missing or extra minus in the reward or in the post-processing of advantages. A loss, a "
        "cost or a distance may be used as a reward.",
    ),
    "late": (
        "rewards come one sample late",
        "advantages fit the rewards of the previous sample",
        "Check the code that gathers rewards. A batch may be shifted by one (a queue, an index that begins "
        "at 1), or samples may be reordered between reward and training.",
    ),
    "early": (
        "rewards come one sample early",
        "advantages fit the rewards of the next sample",
        "Check the code that gathers rewards. A batch may be shifted by one, or samples may be reordered "
        "between reward and training.",
    ),
    "others": (
        "the baseline is over samples of other prompts",
        "advantages fit rewards minus the mean over samples of several prompts",
        "Check how samples are grouped. Compare --n-samples-per-prompt with the real size of a group, and "
        "look for a shuffle or a filter between sampling and the advantages.",
    ),
    "batch": (
        "the baseline is over the whole batch",
        "advantages fit rewards minus the mean over all samples",
        "The estimator takes the mean over the samples of a prompt, so check how samples are grouped "
        "(group_index, --n-samples-per-prompt).",
    ),
    "partial": (
        "they are 0 at a part of the response tokens",
        "most samples have their advantage at some response tokens and 0 at others",
        "Check the code that spreads an advantage over tokens. It may use the mask of the last turn or of "
        "another sample. If these tokens should not train, mask them, because they count in the mean of the "
        "loss.",
    ),
    "unlike": (
        "they are unrelated to them",
        "advantages fit neither the rewards of the prompt nor those of neighbouring samples or groups",
        "Compare the reward and the advantage of a few samples by hand. Usual causes are a wrong reward key, "
        "samples that are reordered between reward and training, and rewards of another run.",
    ),
}


def look(d: Diagnosis) -> Figures | None:
    """Finds the wrong kind of advantages that most rollouts have."""
    rollouts_of = {kind: rollouts for kind, rollouts in vars(d.statistics.estimators).items() if rollouts}
    known = sum(len(rollouts) for kind, rollouts in rollouts_of.items() if kind not in ("zero", "flat"))
    need(known, "advantages, rewards and groups of the samples")
    estimator = str(d.flags.get("advantage_estimator") or "")
    kinds = {kind for kind in SAID if kind in rollouts_of and (kind not in UNSURE or estimator in BY_PROMPT)}
    kind = NAN if NAN in kinds else max(kinds, key=lambda name: len(rollouts_of[name]), default=None)
    if kind is None or (kind != NAN and len(rollouts_of[kind]) < HALF * known):
        return None
    if kind == "unlike" and known < 2:  # one rollout may be so by chance
        return None
    said, how, fix = SAID[kind]
    return {
        "said": said,
        "how": how,
        "fix": fix,
        "count": len(rollouts_of[kind]),
        "known": known,
        "estimator": estimator,
        "rollouts": tuple(sorted(rollouts_of[kind])),
    }

"""The finding ``advantages``."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

import numpy

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.estimators import (
    ROUNDING,
    Estimators,
    kind_of,
    of_samples,
    with_one_reward,
    with_reward,
)
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout


class OnePrompt(NamedTuple):
    """A prompt whose samples all have one reward, and its largest |A|."""

    rollout_id: int
    group: int
    largest: float


class OneReward(Measure):
    """The prompts whose samples all have one reward and an advantage that is not 0, up to 16 per rollout."""

    prompts: list[OnePrompt] = field(default_factory=list)

    def close(self, rollout: DumpedRollout) -> None:
        if kind_of(rollout) != "constant":
            return
        assert rollout.rewards is not None and rollout.prompt_ids is not None
        advantage, _ = of_samples(rollout)
        numbers, there = numpy.array(rollout.groups), with_reward(rollout)
        rewards = numpy.where(there, rollout.rewards.numpy(), 0)
        same = with_one_reward(rewards, rollout.prompt_ids.numpy(), there)
        odd = numpy.unique(numbers[same & (abs(advantage) > ROUNDING)]).tolist()[:16]
        largest = (float(abs(advantage[numbers == group]).max()) for group in odd)
        self.prompts += map(OnePrompt, [rollout.rollout_id] * len(odd), odd, largest)


DETECTOR = Detector(
    severity="error",
    explains=False,
    what="""
        advantages do not follow from the rewards: NaN, wrong sign, divided by nearly 0, shifted by one
        sample, baseline over other prompts or one for all, normalised on each rank, or 0 at a part of the
        tokens
    """,
    asks="advantages, rewards, groups",
    title="Advantages do not follow from the rewards: {{ said }}.",
    evidence="""
        In {{ count }} of {{ known }} rollouts {{ how }}.{% if prompts %} Such are group {{
        prompts[0].group }} of rollout {{ prompts[0].rollout_id }}{% for one in prompts[1:6] %}, {{
        one.group }} of {{ one.rollout_id }}{% endfor %}{{ ", ..." if prompts | length > 6 }}, with |A| up
        to {{ "%.3g" | format(prompts | map(attribute="largest") | max) }}.{% endif %}{% if estimator %}
        The run's estimator is {{ estimator }}.{% endif %}
    """,
    threshold="""
        one token that is not finite; one advantage above ten times the range of the rewards and ten times the
        root of the number of tokens; or in half of the rollouts the advantages have a correlation of
        0.98 with this explanation, and a lower one with the rewards minus the mean of their prompt; or those
        of each rank have mean 0 within 1e-4 and variance 1 within 1e-3
    """,
    ruled_out="""
        An estimator that normalises differently, because under every estimator the better sample of a
        prompt has the larger advantage.
    """,
    fix="{{ fix }}",
)
HALF = 0.5
UNSURE = ("batch", "raw", "level", "unlike")  # kinds that are right for another estimator
BY_PROMPT = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
CUSTOM = ("custom_advantage_function_path", "custom_reward_post_process_path")  # which may do as they like
NAN = "nan"
# Kinds of which one rollout is enough, the worst first; other rollouts may have nothing that shows them, such
# as responses of one length, whose ranks all have the same advantages.
EXACT = (NAN, "blown", "chunks", "ranks")
SAID = {
    NAN: (
        "they are NaN or infinite",
        "response tokens have an advantage that is NaN or infinite, so the loss is, too",
        "Look for a NaN reward, and for a group whose rewards are all equal and are divided by their "
        "standard deviation.",
    ),
    "blown": (
        "some are divided by nearly 0",
        "an advantage is more than ten times the range of the rewards, and ten times what a standard "
        "deviation over all tokens leaves",
        "Look for a standard deviation over the other samples of a prompt, which is 0 if these have one "
        "reward (NVIDIA-NeMo/RL#1518), and for an epsilon of 1e-6. Do not divide there.",
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
    "raw": (
        "nothing is subtracted from them",
        "advantages are the rewards, times one factor for all prompts",
        "Check how samples are grouped. In a group of one sample there is no other reward to compare with "
        "(rllm-org/rllm#924). Give the samples of a prompt one group_index.",
    ),
    "level": (
        "one number is subtracted for all prompts, and it is no mean of them",
        "advantages fit the rewards minus a number that is neither the mean of the prompt nor that of all "
        "samples",
        "Print what is subtracted. A mean over tokens and pads counts the pads as rewards of 0 "
        "(NovaSky-AI/SkyRL#1305). Multiply the rewards by the mask, and divide their sum by the mask's sum.",
    ),
    "partial": (
        "they are 0 at a part of the response tokens",
        "most samples have their advantage at some response tokens and 0 at others",
        "Check the code that spreads an advantage over tokens. It may use the mask of the last turn or of "
        "another sample. If these tokens should not train, mask them, because they count in the mean of the "
        "loss.",
    ),
    "chunks": (
        "context-parallel ranks normalise them separately",
        "the advantages of a sample have several values, and those of each context-parallel rank have mean 0 "
        "and variance 1",
        "Normalise over all ranks: sum the advantages, their squares and the mask over the context-parallel "
        "ranks as well (THUDM/slime#2235), or leave --normalize-advantages out.",
    ),
    "ranks": (
        "data-parallel ranks normalise them separately",
        "the advantages of each data-parallel rank have mean 0 and variance 1 over its tokens",
        "Normalise over all ranks: sum the advantages, their squares and the mask over the data-parallel "
        "ranks before the mean and the deviation are taken.",
    ),
    "constant": (
        "prompts whose samples all have one reward have advantages that are not 0",
        "advantages fit the rewards, except at the prompts whose samples all have one reward",
        "Drop these prompts, or add an epsilon to the standard deviation by which advantages are divided: "
        "rounding over a deviation of nearly 0 trains on noise.",
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
    rollouts_of = {kind: rollouts for kind, rollouts in vars(d.of(Estimators)).items() if rollouts}
    known = sum(len(rollouts) for kind, rollouts in rollouts_of.items() if kind not in ("zero", "flat"))
    need(known, "advantages, rewards and groups of the samples")
    estimator = str(d.flags.get("advantage_estimator") or "")
    is_by_prompt = estimator in BY_PROMPT and d.flags.get("rewards_normalization") is not False
    is_by_prompt &= not any(d.flags.get(function) for function in CUSTOM)
    kinds = {kind for kind in SAID if kind in rollouts_of and (kind not in UNSURE or is_by_prompt)}
    exact = next((kind for kind in EXACT if kind in kinds), None)
    kind = exact or max(kinds, key=lambda name: len(rollouts_of[name]), default=None)
    if kind is None or (not exact and len(rollouts_of[kind]) < HALF * known):
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
        "prompts": d.of(OneReward).prompts if kind == "constant" else (),
        "rollouts": tuple(sorted(rollouts_of[kind])),
    }

"""What makes every other number worthless: nothing to train on, a column copied from the other, files of
another run, samples that are missing or there twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.findings.detector import Figures, need, need_tokens
from slime_ext.tools.analysis.measures.detector_statistics import RolloutSummary
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.tables import earlier, run_begins

LEFT_OUT = 0.01  # share of the samples
UNREAD = 0.1  # share of the rollouts
OTHERS = 0.5  # share of the samples that both dumps hold
EQUAL_TOKENS = 100  # tokens
ALIKE = 1e-6  # nats, mean |l|; engines that close have whole rollouts without a difference by chance
TWICE, TWICE_SHARE = 2, 1e-3  # samples, beyond what chance makes
COPIED = (1e-3, 1e-2, 1e-1)  # shares of copies that are set against chance
BY_CHANCE = 12.0  # nats: chance gets there in one of 160,000 runs
IMPROBABLE, MOSTLY = 10.0, 0.5  # nats of a repeated sample; share of those that may be repeats
TRUNCATED = (
    "whether sampling is truncated where log-probs are of the whole distribution: record the kept sets, or "
    "the trainer's entropy (slime: --use-rollout-entropy)"
)


def no_response_tokens(d: Diagnosis) -> Figures | None:
    """Finds rollouts in which every token is masked."""
    blank = tuple(sorted(d.statistics.blank))
    return {"rollouts": blank, "blank": len(blank), "every": len(d.timeline)} if blank else None


def left_out(d: Diagnosis) -> Figures | None:
    """Finds that a part of the samples, or of the files, could not be read."""
    out, read = d.statistics.counts["left_out"], d.statistics.counts["samples"]
    is_much = out >= max(1, LEFT_OUT * (out + read)) or d.unread >= max(1, UNREAD * len(d.timeline))
    return {"out": out, "samples": out + read, "files": d.unread} if is_much else None


def other_run(d: Diagnosis) -> Figures | None:
    """Finds that the sampler's log-probs of most samples begin otherwise in the train dump than in the
    rollout dump."""
    paired, foreign = d.statistics.counts["paired"], d.statistics.counts["foreign"]
    need(paired, "rollout dumps and train dumps that both hold rollout_log_probs")
    return {"foreign": foreign, "paired": paired} if foreign > OTHERS * paired else None


def repeated_rollouts(d: Diagnosis) -> Figures | None:
    """Finds rollout numbers that come back in a file after others."""
    again = tuple(sorted(set(d.statistics.again)))
    return {"rollouts": again} if again else None


def duplicate_samples(d: Diagnosis) -> Figures | None:
    """Finds more samples of the tokens and the log-probs of another, bit by bit, than chance makes: among
    those of a prompt, or among all."""
    prints = sorted(d.statistics.prints, key=lambda own: own.rollout_id)
    need(prints, "samples with a response")
    samples, prompts, surprise = (torch.cat(own) for own in list(zip(*prints, strict=True))[1:])
    at = torch.cat([torch.full_like(own.samples, own.rollout_id) for own in prints])
    own_prompt = torch.stack([samples, prompts]).unique(dim=1, return_inverse=True)[1]
    found = (_Copies.of(*keys, surprise.double()) for keys in ((own_prompt, prompts), (samples, 0 * prompts)))
    copies = max(found, key=lambda one: one.evidence)
    twice, least = int(copies.is_again.sum()), max(TWICE, TWICE_SHARE * len(samples))
    if copies.evidence < BY_CHANCE or round(twice - copies.chance) < least:
        return None
    _, kind, counts = copies.keys.unique(return_inverse=True, return_counts=True)
    first = torch.empty_like(counts).scatter_(0, kind[~copies.is_again], at[~copies.is_again])
    across = int((first[kind] != at).sum())
    figures = {
        "twice": twice,
        "samples": len(samples),
        "chance": copies.chance,
        "across": across,
        "rollouts": tuple(at[counts[kind] > 1].unique().tolist()),
    }
    is_odd = int((copies.is_again & (surprise > IMPROBABLE)).sum()) >= TWICE
    is_known = d.statistics.counts["known"] or d.statistics.means["surprise"].count
    if across or is_known or (is_odd and twice < MOSTLY * copies.later):
        return figures
    return figures | {"or_else": ("truncated_sampling",), "untold": TRUNCATED}


class _Copies(NamedTuple):
    """The samples that are equal to an earlier one, and whether chance made them."""

    keys: Tensor  # [N] equal where samples are
    is_again: Tensor  # [N] bool
    later: int  # samples that have an earlier one
    evidence: float  # log likelihood of copies over that of chance
    chance: float  # how many chance makes

    @classmethod
    def of(cls, keys: Tensor, pools: Tensor, surprise: Tensor) -> _Copies:
        """Of samples [N] in the order in which they were made.

        Of a sample y that comes after m others of its pool, c of them like it: let it be a copy of one of
        them with probability e, else sampled with q(y). Against chance that is 1 - e + e c / (m q(y)) times
        as likely, and 1 in the mean over what q samples. So chance makes the product over all samples,
        whatever the prompts and however probable the answers, x times as large in one of x runs at most.
        """
        before, alike = earlier(pools), earlier(keys)
        copied = (alike / before.clamp_min(1)).log() + surprise
        against = [
            torch.logaddexp(torch.full_like(copied, math.log1p(-e)), copied + math.log(e))[before > 0].sum()
            for e in COPIED
        ]
        order = pools.argsort(stable=True)
        new = torch.where(alike > 0, 0, (-surprise).exp())[order]  # probability of each other answer
        sums, begins = new.cumsum(0) - new, run_begins(pools[order])
        of_pool = sums[begins].repeat_interleave(begins.diff(append=begins.new_tensor([len(order)])))
        evidence = float(torch.stack(against).logsumexp(0)) - math.log(2 * len(COPIED))
        chance = float((sums - of_pool).clamp(max=1.0).sum())
        return cls(keys, alike > 0, int((before > 0).sum()), evidence, chance)


def outside_vocabulary(d: Diagnosis) -> Figures | None:
    """Finds token ids that the model has no row for."""
    vocabulary, counts = d.statistics.ids, d.statistics.counts
    lacks = (
        "the number of token ids: --tokenizer, the tokenizer/ of slime's dumps, or args.json with vocab_size "
        "or hf_checkpoint in the run's folder"
    )
    need(vocabulary is not None, lacks)
    if not counts["beyond"]:
        return None
    return {
        "count": counts["beyond"],
        "tokens": d.sums["tokens"],
        "samples": counts["beyond_in"],
        "sequences": d.sums["sequences"],
        "vocabulary": vocabulary,
    }


def equal_columns(d: Diagnosis) -> Figures | None:
    """Finds rollouts in which the log-probs of both sides are equal at every token, bit by bit."""
    need_tokens(d, EQUAL_TOKENS)
    equal = tuple(s.rollout_id for s in d.statistics.rollouts if not s.absolute and s.surprise)
    tokens = sum(s.tokens for s in d.statistics.rollouts if s.rollout_id in equal)
    every, others = len(d.statistics.rollouts), [s for s in d.statistics.rollouts if s.absolute]
    if tokens < EQUAL_TOKENS or (others and _equal_by_chance(others)):
        return None
    severity = "note" if len(equal) == every else "warning"  # two engines may be meant to be bitwise alike
    return {"tokens": tokens, "equal": len(equal), "every": every, "rollouts": equal, "severity": severity}


def _equal_by_chance(others: Sequence[RolloutSummary]) -> bool:
    """Whether the rollouts with differences differ so rarely, or so little, that some may have none."""
    return max(s.absolute for s in others) < ALIKE or not any(s.median for s in others)

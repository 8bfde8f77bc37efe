"""The finding ``duplicate_samples``."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.tables import earlier, run_begins

DETECTOR = Detector(
    severity="warning",
    after=(
        "positive_log_probs",
        "greedy_sampling",
        "kept_mass",
        "before_temperature",
        "unlike_entropy",
        "constrained_decoding",
    ),
    explains=False,
    what="samples appear twice, within a rollout or across rollouts, more often than chance makes",
    asks="",
    title="Samples appear twice.",
    evidence="""
        {{ twice }} of {{ samples }} samples ({{ twice | share(samples) }}) have prompt, tokens and
        log-probs of another, bit by bit, where chance makes {{ "%.2g" | format(chance) if chance >= 0.01
        else "none" }}; {{ across }} of them those of an earlier rollout.
    """,
    threshold="copies e^12 times as likely as chance, and 2 more samples (0.1%) than chance makes",
    ruled_out="Chance: how probable each sample is was counted, by its own log-probs.",
    fix="""
        {% if across > twice / 2 -%} A buffer that hands out samples again, or a rollout that was loaded
        from a dump: meant, or each is trained on twice. {%- else -%} Within a rollout either the sample
        was copied (a custom generate function that returns one list for a group, a retry that keeps both)
        or the engine samples less than its log-probs say (greedily, with top-p): look whether most
        answers to a prompt are the same. {%- endif %}
    """,
)

TWICE, TWICE_SHARE = 2, 1e-3  # samples, beyond what chance makes
COPIED = (1e-3, 1e-2, 1e-1)  # shares of copies that are set against chance
BY_CHANCE = 12.0  # nats: chance gets there in one of 160,000 runs
IMPROBABLE, MOSTLY = 10.0, 0.5  # nats of a repeated sample; share of those that may be repeats
TRUNCATED = (
    "whether sampling is truncated where log-probs are of the whole distribution: record the kept sets, or "
    "the trainer's entropy (slime: --use-rollout-entropy)"
)


def look(d: Diagnosis) -> Figures | None:
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

"""The finding ``duplicate_samples``."""

from __future__ import annotations

import math
import zlib
from dataclasses import field
from typing import ClassVar, NamedTuple

import numpy
import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need
from slime_ext.tools.analysis.detectors.shared.kept_sets import Kept
from slime_ext.tools.analysis.detectors.shared.mixed import mixed
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import earlier, run_begins
from slime_ext.tools.analysis.values import integers

MIXER = 0x1E3779B97F4A7C15  # an odd number with irregular bits, for hashes


class Prints(NamedTuple):
    """Fingerprints of n samples of a rollout, by which copies are found."""

    rollout_id: int
    samples: Tensor  # [n] int64, equal if tokens and the sampler's log-probs are equal, bit by bit
    prompts: Tensor  # [n] int64, equal if the prompts are equal
    surprise: Tensor  # [n] float32, -log behavior of the whole response, nats


class Fingerprints(Measure):
    """The fingerprints of all samples of the run that have a response."""

    takes_joined: ClassVar[bool] = True

    prints: list[Prints] = field(default_factory=list)

    def add(self, part: DumpedRollout) -> None:
        counts = [one.count for one in part.rollouts]
        columns = [column.split(counts) for column in (*fingerprints(part), part.responding)]
        for one, (*prints, there) in zip(part.rollouts, zip(*columns, strict=True), strict=True):
            self.prints.append(Prints(one.rollout_id, *(column[there] for column in prints)))


def fingerprints(part: DumpedRollout) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the last three fields of ``Prints`` for all samples of a part, [S] each."""
    behavior = part.compared(part.behavior)
    (surprise,) = part.sums([-behavior])
    # With numpy, because PyTorch has no vector instructions for integers of 64 bits.
    hashes = behavior.view(torch.int32).numpy().astype(numpy.int64)
    if part.tokens is not None:
        tokens = part.tokens if part.has_all else part.segments.zeroed(part.tokens)
        hashes ^= tokens.numpy() << 32
    hashes ^= hashes >> 29
    by_place = MIXER * (2 * torch.arange(max(part.lengths, default=0)) + 1)
    hashes *= by_place.index_select(0, part.segments.within).numpy()
    hashes ^= hashes >> 31
    hashes *= MIXER
    sums = torch.from_numpy(numpy.concatenate([[0], hashes.cumsum()]))  # modulo 2^64
    texts = part.prompts or [""] * part.count
    prints = {text: zlib.crc32(text.encode()) for text in set(texts)}  # samples of a group share a prompt
    prompts = integers([prints[text] for text in texts])
    samples = sums[part.segments.bounds].diff()
    return samples, prompts, surprise.float()


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
    what="samples appear twice, in one rollout or in several, more often than by chance",
    asks="",
    title="Samples appear twice.",
    evidence="""
        {{ twice }} of {{ samples }} samples ({{ twice | share(samples) }}) have the same prompt,
        tokens and log-probs as an earlier sample, bit by bit. Chance would make {{ "%.2g" |
        format(chance) if chance >= 0.01 else "none" }}. {{ across }} of them repeat a sample of an
        earlier rollout.
    """,
    threshold="""
        copies are e^12 times as likely as chance, and there are 2 samples (and 0.1% of all) more than
        chance makes
    """,
    ruled_out="Chance, because the probability of each sample was counted from its log-probs.",
    remedy="find the code that copies samples or loads them again",
    fix="""
        {% if across > twice / 2 -%} A buffer returns samples again, or a rollout was loaded from a
        dump. If you did not mean this, samples are trained on twice. {%- else -%} Either samples were
        copied in a rollout (a custom generate function that returns one list for a group, a retry
        that keeps both answers), or the engine samples less randomly than its log-probs say
        (greedily, with top-p). Check whether most answers to a prompt are the same. {%- endif %}
    """,
)

TWICE, TWICE_SHARE = 2, 1e-3  # samples, and share of all, beyond those by chance
COPIED = (1e-3, 1e-2, 1e-1)  # shares of copies that are compared with chance
BY_CHANCE = 12.0  # nats; chance reaches this in at most one of 160,000 runs
# Nats, -log probability of a repeated sample; share of the samples that have an earlier one.
IMPROBABLE, MOSTLY = 10.0, 0.5
TRUNCATED = Untold(
    "whether the engine truncates sampling but records log-probs of the whole distribution",
    "record the kept sets or the trainer's entropy (slime: --use-rollout-entropy)",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds more equal samples than chance makes, among those of a prompt or among all."""
    # The chance follows from the recorded log-probs.
    need(mixed(d) is None, "log-probs of the policy that drew the tokens")
    prints = sorted(d.of(Fingerprints).prints, key=lambda group: group.rollout_id)
    need(prints, "samples with a response")
    samples, prompts, surprise = (torch.cat(column) for column in list(zip(*prints, strict=True))[1:])
    least = max(TWICE, TWICE_SHARE * len(samples))
    if len(samples) - len(numpy.unique(samples.numpy())) < least:  # before chance is counted
        return None
    rollout_ids = torch.cat([torch.full_like(group.samples, group.rollout_id) for group in prints])
    index, of_prompt = (keys.unique(return_inverse=True)[1] for keys in (samples, prompts))
    in_prompt = index * len(of_prompt) + of_prompt  # because unique pairs take five times as long
    pools = ((in_prompt, prompts), (samples, 0 * prompts))
    copies = max(
        (_Copies.of(keys, pool, surprise.double()) for keys, pool in pools), key=lambda one: one.evidence
    )
    twice = int(copies.is_again.sum())
    if copies.evidence < BY_CHANCE or round(twice - copies.chance) < least:
        return None
    _, kind, counts = copies.keys.unique(return_inverse=True, return_counts=True)
    first = torch.empty_like(counts).scatter_(0, kind[~copies.is_again], rollout_ids[~copies.is_again])
    across = int((first[kind] != rollout_ids).sum())
    figures = {
        "twice": twice,
        "samples": len(samples),
        "chance": copies.chance,
        "across": across,
        "rollouts": tuple(rollout_ids[counts[kind] > 1].unique().tolist()),
    }
    is_odd = int((copies.is_again & (surprise > IMPROBABLE)).sum()) >= TWICE
    is_known = d.of(Kept).known or d.means.surprise.count
    if across or is_known or (is_odd and twice < MOSTLY * copies.later):
        return figures
    return figures | {"or_else": ("truncated_sampling",), "untold": (TRUNCATED,)}


class _Copies(NamedTuple):
    """The samples that are equal to an earlier sample, and how likely that is by chance."""

    keys: Tensor  # [N] equal numbers for equal samples
    is_again: Tensor  # [N] bool, equal to an earlier sample
    later: int  # samples that have an earlier one in their pool
    evidence: float  # log likelihood ratio of copies against chance
    chance: float  # expected number of equal samples by chance

    @classmethod
    def of(cls, keys: Tensor, pools: Tensor, surprise: Tensor) -> _Copies:
        """Counts the copies among samples [N], in the order of sampling.

        Let a sample y come after m others of its pool, c of which are equal to y. The hypothesis is that y
        is a copy of one of them with probability e, and else sampled from q. The likelihood ratio against
        chance is then 1 - e + e c / (m q(y)), whose mean under q is 1. So by chance the product over all
        samples exceeds x in at most one of x runs (Markov), whatever the prompts and answers.
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

"""Defines one rollout as the analysis reads it from any kind of file.

``T`` is the number of response tokens, which are packed sample after sample. ``S`` is the number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from slime_ext.core.correction import Tokens
from slime_ext.core.tokens import Head, Support
from slime_ext.ops.divergences import is_log_prob, k3, log_ratio
from slime_ext.ops.segments import Segments, as_numbers

# These columns are summed over tokens. "near" is k3, but at most MOST_K3, so that no single token determines
# a mean.
TOKEN_COLUMNS = ("count", "absolute", "squared", "log_ratio", "k3", "near")
SURPRISES = 14  # bins of -log behavior
MOST_K3 = 142.4  # nats, at a log-ratio of 5
PER_TOKEN = (
    "behavior", "proximal", "mask", "tokens", "advantages", "versions", "entropy", "reference", "kept",
    "overlap", "kl", "tail", "sampler_head", "trainer_head",
)  # fmt: skip
PER_SAMPLE = (
    "lengths", "prompt_lengths", "positions", "rewards", "groups", "steps", "cached", "prompts", "responses",
    "ranks", "engines", "statuses", "places",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class DumpedRollout:
    """The samples of one rollout, ordered by position. All tensors are on the CPU.

    Args:
        rollout_id: number of the rollout in its run.
        source: the file or files of the rollout, for messages.
        lengths: [S] response lengths, tokens.
        prompt_lengths: [S] prompt lengths, tokens.
        positions: [S] place of each sample in the rollout dump.
        behavior: [T] log-probs under the policy that sampled, nats; NaN if none was recorded.
        proximal: [T] log-probs under the trainer's policy before the optimizer step, nats.
        mask: [T] bool, the host's response mask.
        tokens: [T] int64 ids of the response, or None.
        advantages: [T], or None.
        rewards: [S] float64 raw rewards, NaN if missing; or None.
        versions: [T] int64, version of the weights that sampled each token, -1 if unknown; or None.
        newest: the newest version that sampled a token, from which ages are counted; None if unknown.
        groups: [S] number of the prompt of each sample, or None.
        steps: [S] optimizer step that trained each sample, counted from 0 in the rollout, or None.
        cached: [S] number of prompt tokens that the engine took from its prefix cache, or None.
        ranks: [S] the trainer's data-parallel rank of each sample, or None.
        engines: [S] name of the engine that sampled each sample, "" if unknown; None if no sample has one.
        statuses: [S] how each sample ended, in the host's words ("completed", "truncated", "aborted"), "" if
            unknown.
        places: [S] how many samples come before each sample in its micro-batch, or None.
        prompts: [S] texts, "" if missing.
        responses: [S] texts, "" if missing.
        entropy: [T] of the trainer's policy at each position, nats, or None.
        reference: [T] log-probs under the first policy (slime's ref_log_probs), nats, or None.
        kept: [T] how many tokens top-p or top-k kept at each position, negative if the sampled token is not
            among them, NaN if unknown; or None.
        overlap: [T] share of the sampler's experts that the trainer chose too, mean over layers, or None.
        kl: [T] KL(behavior || proximal) from the sampler's head, nats, NaN if unknown; or None.
        tail: [T] the probability of the tokens beyond the head; or None.
        sampler_head, trainer_head: [T, K] log-probs of the same tokens under both policies, nats. If
            ``is_exact``, the tokens are all that top-p kept, padded with NaN; else the sampler's K likeliest.
        routes: [layers, 2] sum of the overlap over tokens, and number of tokens; or None.
        experts: [experts, 2] how often the sampler chose each expert, and how often only the sampler chose
            it; or None.
        routing: counts of samples by the experts that the sampler recorded (``readers.routes.odd_routes``).
        dropped: [D, 4] float64, response length, reward, position and oldest weight version (NaN: unknown)
            of the samples that only the rollout dump holds.
        why_dropped: [D] status of each dropped sample ("truncated": at the length limit, "aborted", ...).
        retold: number of samples that have different tokens in the two dumps.
        paired: number of samples that have log-probs of the sampler in both dumps.
        foreign: number of paired samples whose first log-probs of the sampler differ between the dumps.
        left_out: number of samples that could not be read.
        again: true if the rollout's number came before in the same file, with other numbers between.
        notes: what the reader had to leave out, one line each.
        midway: the reward above which a sample counts as correct.
    """

    rollout_id: int
    source: str
    lengths: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    positions: tuple[int, ...]
    behavior: Tensor
    proximal: Tensor
    mask: Tensor
    tokens: Tensor | None = None
    advantages: Tensor | None = None
    rewards: Tensor | None = None
    versions: Tensor | None = None
    newest: int | None = None
    groups: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    cached: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    engines: tuple[str, ...] | None = None
    statuses: Sequence[str] = ()
    places: tuple[int, ...] | None = None
    prompts: Sequence[str] = ()
    responses: Sequence[str] = ()
    entropy: Tensor | None = None
    reference: Tensor | None = None
    kept: Tensor | None = None
    overlap: Tensor | None = None
    kl: Tensor | None = None
    tail: Tensor | None = None
    sampler_head: Tensor | None = None
    trainer_head: Tensor | None = None
    is_exact: bool = False
    routes: Tensor | None = None
    experts: Tensor | None = None
    routing: Mapping[str, int] = field(default_factory=dict)
    dropped: Tensor | None = None
    why_dropped: Sequence[str] = ()
    retold: int = 0
    paired: int = 0
    foreign: int = 0
    left_out: int = 0
    again: bool = False
    notes: tuple[str, ...] = ()
    midway: float = 0.0

    @property
    def count(self) -> int:
        """S, the number of samples."""
        return len(self.lengths)

    @property
    def size(self) -> int:
        """T, the number of response tokens."""
        return sum(self.lengths)

    @cached_property
    def segments(self) -> Segments:
        """The place of each sample in the packed tokens."""
        return Segments.whole(self.lengths, self.mask)

    def samples_with(self, flags: Tensor) -> Tensor:
        """Returns the samples with at least one flagged token, [T] bool -> [S] bool."""
        return self.segments.local_sums([as_numbers(flags, torch.float32)])[0] > 0

    @cached_property
    def responding(self) -> Tensor:
        """The samples with a response token, [S] bool."""
        return self.samples_with(self.mask)

    @cached_property
    def ages(self) -> Tensor | None:
        """The age of the weights that sampled each token, in versions behind ``newest``, [T] float32.

        NaN if unknown; None if no age is known.
        """
        if self.versions is None or self.newest is None:
            return None
        return torch.where(self.versions >= 0, (self.newest - self.versions).float(), torch.nan)

    @cached_property
    def masses(self) -> tuple[float, float] | None:
        """The sum of A over response tokens with A > 0, and the sum of |A| over those with A < 0.

        None without advantages.
        """
        return None if self.advantages is None else masses_of(self.segments.zeroed(self.advantages))

    @cached_property
    def log_ratio(self) -> Tensor:
        """log proximal - log behavior of each token, [T], nats; 0 where ``finite`` is false."""
        return torch.where(self.finite, log_ratio(self.proximal, self.behavior, self.mask), 0)

    @cached_property
    def finite(self) -> Tensor:
        """The response tokens whose log-probs the hook can compare, [T] bool.

        The sampler's value is a log-prob, and the trainer's value is finite.
        """
        return self.mask & is_log_prob(self.behavior) & (self.proximal.abs() < torch.inf)

    @cached_property
    def has_all(self) -> bool:
        """Whether ``finite`` is true at every token."""
        return bool(self.finite.all())

    def compared(self, values: Tensor) -> Tensor:
        """Returns the values [T], with 0 where ``finite`` is false."""
        return values if self.has_all else torch.where(self.finite, values, 0)

    @cached_property
    def surprise(self) -> Tensor:
        """The bin of -log behavior, [T]: two bins per decade from 1e-5 nats on."""
        surprise = (-self.compared(self.behavior)).clamp(min=0).log10().add(5).mul(2)
        return surprise.clamp(0, SURPRISES - 1).floor()

    @cached_property
    def columns(self) -> Tensor:
        """The TOKEN_COLUMNS of each token, [6, T] float64; 0 where ``finite`` is false."""
        log_ratio_ = self.log_ratio.double()
        distance = k3(log_ratio_)
        rows = (
            self.finite,
            log_ratio_.abs(),
            log_ratio_.square(),
            log_ratio_,
            distance,
            distance.clamp(max=MOST_K3),
        )
        return torch.stack([row.double() for row in rows])

    def oldest_versions(self) -> Tensor:
        """Returns the oldest version of the weights that sampled each sample, [S] float64; NaN if unknown."""
        if self.versions is None:
            return torch.full((self.count,), torch.nan, dtype=torch.float64)
        lowest = [int(part.min()) if len(part) else -1 for part in self.versions.split(self.lengths)]
        oldest = torch.tensor(lowest, dtype=torch.float64)
        return torch.where(oldest < 0, torch.nan, oldest)

    @cached_property
    def turns(self) -> Tensor:
        """The turn of each token in its sample, [T], counted from 0; meaningless at masked tokens."""
        if not self.size:
            return self.segments.turn_ids
        lengths = torch.tensor(self.lengths)
        firsts = (lengths.cumsum(0) - lengths).clamp(max=self.size - 1)  # also of samples without a token
        turns = self.segments.turn_ids
        return turns - self.segments.expand(turns[firsts] + (~self.mask[firsts]).long())

    def parts(self, limit: int = 1 << 17) -> Iterator[DumpedRollout]:
        """Yields the rollout in parts, so that temporary tensors stay small.

        A part has whole samples with at most ``limit`` tokens, or one longer sample. Its tensors are views.
        """
        first, begin, end = 0, 0, 0
        for i, length in enumerate(self.lengths):
            if end > begin and end + length - begin > limit:
                yield self._part(first, i, begin, end)
                first, begin = i, end
            end += length
        if self.count:
            yield self._part(first, self.count, begin, end)

    def _part(self, first: int, last: int, begin: int, end: int) -> DumpedRollout:
        fields = {name: getattr(self, name) for name in (*PER_TOKEN, *PER_SAMPLE)}
        cuts = dict.fromkeys(PER_TOKEN, (begin, end)) | dict.fromkeys(PER_SAMPLE, (first, last))
        return replace(self, **{k: None if v is None else v[slice(*cuts[k])] for k, v in fields.items()})

    def correction_input(self) -> Tokens:
        """Returns what a correction reads.

        The proximal policy takes the place of the target policy, because a dump has no other. They are equal
        at the first optimizer step of a rollout.
        """
        return Tokens(
            self.segments,
            self.proximal,
            self.behavior,
            target=self.proximal,
            advantages=self.advantages,
            head=self.candidates(),
        )

    def candidates(self) -> Head | Support | None:
        """Returns what ``center`` reads; None if the dump lacks it."""
        if self.sampler_head is None or self.trainer_head is None:
            return None
        if not self.is_exact:
            return Head(self.sampler_head, self.trainer_head)
        there = ~self.sampler_head.isnan()
        offsets = torch.nn.functional.pad(there.sum(1).cumsum(0), (1, 0))
        return Support(self.sampler_head[there], self.trainer_head[there], offsets)


def masses_of(advantages: Tensor) -> tuple[float, float]:
    """Returns the sum of A where A > 0, and of |A| where A < 0, in float64."""
    total, size = float(advantages.double().sum()), float(advantages.abs().double().sum())
    return (size + total) / 2, (size - total) / 2

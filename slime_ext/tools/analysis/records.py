"""One rollout as the analysis sees it, whatever file it came from.

``T`` counts the response tokens of the rollout, packed sample after sample, ``S`` the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from slime_ext.core.correction import Tokens
from slime_ext.core.state import Head, Support
from slime_ext.ops.divergences import is_log_prob, k3, log_ratio
from slime_ext.ops.segments import Segments, as_numbers

# What is added up over tokens of the log-ratio; "near" is k3, but at most MOST_K3, so that no token makes a
# mean.
TOKEN_COLUMNS = ("count", "absolute", "squared", "log_ratio", "k3", "near")
SURPRISES = 14  # bins of how sure the sampler was
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
    """The samples of one rollout in the order of their positions, all tensors on the CPU.

    Args:
        rollout_id: number of the rollout in its run.
        source: file or files that it was read from, for messages.
        lengths: [S] response lengths, tokens.
        prompt_lengths: [S] prompt lengths, tokens.
        positions: [S] place of each sample in the rollout dump.
        behavior: [T] log-probs under the policy that sampled, nats; NaN where none was recorded.
        proximal: [T] log-probs under the trainer's policy before the optimizer step, nats.
        mask: [T] bool, the host's response mask.
        tokens: [T] int64 ids of the response, or None.
        advantages: [T], or None.
        rewards: [S] float64 raw rewards, NaN for none, or None.
        versions: [T] int64, which weights sampled each token, -1 for unknown, or None.
        newest: the version that ages are counted from, the newest that sampled a token; None for unknown.
        groups: [S] prompt that each sample answers, or None.
        steps: [S] optimizer step of the rollout, from 0, that trained each sample, or None.
        cached: [S] tokens of the prompt whose keys and values the engine took from its prefix cache, or None.
        ranks: [S] data-parallel rank of the trainer that each sample was trained on, or None.
        engines: [S] name of the engine that sampled each sample, "" where it has none; None where no sample
            has one.
        statuses: [S] how each sample ended, in the host's words ("completed", "truncated", "aborted"), "" for
            unknown.
        places: [S] how many samples come before each in its micro-batch, or None.
        prompts: [S] texts, "" for none.
        responses: [S] texts, "" for none.
        entropy: [T] of the trainer's policy at each position, nats, or None.
        reference: [T] log-probs under the first policy (slime's ref_log_probs), nats, or None.
        kept: [T] how many tokens top-p or top-k left at each position, negative where the sampled token is
            none of them, NaN for unknown; or None.
        overlap: [T] share of the sampler's experts that the trainer chose too, mean over layers, or None.
        kl: [T] KL(behavior || proximal) from the sampler's head, nats, NaN for unknown; ``tail`` [T] the
            probability that the head leaves out; or None.
        sampler_head, trainer_head: [T, K] log-probs of the same tokens under both policies, nats; of the
            sampler's K most likely ones, or, where ``is_exact``, of all that top-p left, NaN behind them.
        routes: [layers, 2] sums of that share and number of tokens, by layer; ``experts`` [experts, 2] how
            often the sampler chose each, and how often of these the trainer did not; or None.
        routing: counts of samples by the experts that the sampler recorded (``readers.routes.odd_routes``).
        dropped: [D, 4] float64, response length, reward, position and oldest weight version (NaN: unknown)
            of samples that the rollout dump holds and the train dump lacks; ``why_dropped`` [D] their status
            ("truncated": at the length limit, "aborted", ...).
        retold: samples of which the two dumps hold other tokens; ``foreign`` those of which the sampler's
            log-probs begin otherwise in the two, of ``paired`` that both hold.
        left_out: samples of the files that could not be read.
        again: the rollout's number came before in its file, with others between.
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
        """Where each sample lies in the packed tokens."""
        return Segments.whole(self.lengths, self.mask)

    def samples_with(self, flags: Tensor) -> Tensor:
        """[T] bool -> [S] bool, the samples of which a token has the flag."""
        return self.segments.local_sums([as_numbers(flags, torch.float32)])[0] > 0

    @cached_property
    def responding(self) -> Tensor:
        """[S] bool, samples with a response token."""
        return self.samples_with(self.mask)

    @cached_property
    def ages(self) -> Tensor | None:
        """[T] float32, by how many versions the weights that sampled a token are behind ``newest``; NaN for
        unknown; None where none is known."""
        if self.versions is None or self.newest is None:
            return None
        return torch.where(self.versions >= 0, (self.newest - self.versions).float(), torch.nan)

    @cached_property
    def masses(self) -> tuple[float, float] | None:
        """Sum of A over response tokens with A > 0, and of |A| over those with A < 0; None without
        advantages."""
        return None if self.advantages is None else masses_of(self.segments.zeroed(self.advantages))

    @cached_property
    def log_ratio(self) -> Tensor:
        """[T] log proximal - log behavior, nats; 0 where not ``finite``."""
        return torch.where(self.finite, log_ratio(self.proximal, self.behavior, self.mask), 0)

    @cached_property
    def finite(self) -> Tensor:
        """[T] bool, response tokens with a log-prob of the sampler and a finite one of the trainer, as a hook
        reads them."""
        return self.mask & is_log_prob(self.behavior) & (self.proximal.abs() < torch.inf)

    @cached_property
    def has_all(self) -> bool:
        """Whether every token is a response token with both log-probs finite."""
        return bool(self.finite.all())

    def compared(self, values: Tensor) -> Tensor:
        """[T] -> [T], 0 at tokens without both log-probs finite."""
        return values if self.has_all else torch.where(self.finite, values, 0)

    @cached_property
    def surprise(self) -> Tensor:
        """[T] how sure the sampler was: the bin of -log behavior, two per decade from 1e-5 nats on."""
        surprise = (-self.compared(self.behavior)).clamp(min=0).log10().add(5).mul(2)
        return surprise.clamp(0, SURPRISES - 1).floor()

    @cached_property
    def columns(self) -> Tensor:
        """[6, T] float64, TOKEN_COLUMNS of each token, all 0 at those without both log-probs finite."""
        found = self.log_ratio.double()
        distance = k3(found)
        rows = (self.finite, found.abs(), found.square(), found, distance, distance.clamp(max=MOST_K3))
        return torch.stack([row.double() for row in rows])

    def oldest_versions(self) -> Tensor:
        """[S] float64, the oldest version of the weights that sampled each sample; NaN where unknown."""
        if self.versions is None:
            return torch.full((self.count,), torch.nan, dtype=torch.float64)
        lowest = [int(part.min()) if len(part) else -1 for part in self.versions.split(self.lengths)]
        found = torch.tensor(lowest, dtype=torch.float64)
        return torch.where(found < 0, torch.nan, found)

    @cached_property
    def turns(self) -> Tensor:
        """[T] the number of the turn within its sample, from 0; of no meaning at masked tokens."""
        if not self.size:
            return self.segments.turn_ids
        lengths = torch.tensor(self.lengths)
        firsts = (lengths.cumsum(0) - lengths).clamp(max=self.size - 1)  # of samples without a token too
        turns = self.segments.turn_ids
        return turns - self.segments.expand(turns[firsts] + (~self.mask[firsts]).long())

    def parts(self, limit: int = 1 << 17) -> Iterator[DumpedRollout]:
        """The rollout in parts of whole samples with at most ``limit`` tokens (or one longer sample), for
        temporary tensors to stay small. Tensors are views."""
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
        """What a correction reads. The target is the proximal policy: a dump has no other, and at the
        first optimizer step they are the same."""
        return Tokens(
            self.segments,
            self.proximal,
            self.behavior,
            target=self.proximal,
            advantages=self.advantages,
            head=self.candidates(),
        )

    def candidates(self) -> Head | Support | None:
        """What ``center`` reads; None where the dump lacks it."""
        if self.sampler_head is None or self.trainer_head is None:
            return None
        if not self.is_exact:
            return Head(self.sampler_head, self.trainer_head)
        there = ~self.sampler_head.isnan()
        offsets = torch.nn.functional.pad(there.sum(1).cumsum(0), (1, 0))
        return Support(self.sampler_head[there], self.trainer_head[there], offsets)


def masses_of(advantages: Tensor) -> tuple[float, float]:
    """[T] -> sum of A where A > 0, and of |A| where A < 0, added up in float64."""
    total, size = float(advantages.double().sum()), float(advantages.abs().double().sum())
    return (size + total) / 2, (size - total) / 2

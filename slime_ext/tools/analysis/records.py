"""Defines one rollout as the analysis reads it from any kind of file.

``T`` is the number of response tokens, which are packed sample after sample. ``S`` is the number of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy
import torch
from torch import Tensor

from slime_ext.core.correction import Tokens
from slime_ext.core.tokens import Head, Support
from slime_ext.ops.divergences import is_log_prob, k3, log_ratio
from slime_ext.ops.segments import Segments, as_bytes, selected
from slime_ext.tools.analysis.fields import (
    ENGINE_RANK,
    ENGINES,
    ROLLOUT,
    TRAIN,
    UNKNOWN,
    as_floats,
    cached_tokens,
    engine_of,
    kept_sizes,
    per_sample,
    per_token,
    response_ids,
    rows_of,
    status_of,
    version_gap,
)
from slime_ext.tools.analysis.tables import are_equal, count_true, is_finite, tabulated, tabulated_apart
from slime_ext.tools.analysis.values import group_number, integers, number, text

SURPRISES = 14  # bins of -log behavior
MOST_K3 = 142.4  # nats, at a log-ratio of 5; larger k3 count as this, so that no token determines a mean


@dataclass(frozen=True, eq=False)
class DumpedRollout:
    """The samples of one rollout, ordered by position. All tensors are on the CPU.

    Args:
        rollout_id: number of the rollout in its run.
        source: the file or files of the rollout, for messages.
        newest: the newest version that sampled a token, from which ages are counted; None if unknown. If
            rollouts are joined, that of each sample's rollout, [S] int64.
        is_exact: whether the tokens of ``sampler_head`` are all that top-p kept.
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
        is_repeated: true if the rollout's number came before in the same file, with other numbers between.
        notes: what the reader had to leave out, one line each.
        midway: the reward above which a sample counts as correct.
        joined: the rollouts whose samples this one holds, in order (see ``join``); empty if it is one.

    Each other field is a row (``fields.Field``): a tensor [T] or a sequence [S], or None without data.
    """

    rollout_id: int
    source: str
    lengths: tuple[int, ...] = field(
        metadata=per_sample("response length, tokens", "response_length", join=tuple)
    )
    prompt_lengths: tuple[int, ...] = field(
        metadata=per_sample("prompt length, tokens", "prompt_length", join=tuple)
    )
    positions: tuple[int, ...] = field(
        metadata=per_sample("place in the rollout dump", "position", join=tuple)
    )
    behavior: Tensor = field(
        metadata=per_token(
            "log-prob under the policy that sampled, nats; NaN if none was recorded",
            ("rollout_log_probs", "behavior"),
            dumps=(TRAIN, ROLLOUT),
        )
    )
    proximal: Tensor = field(
        metadata=per_token(
            "log-prob under the trainer's policy before the optimizer step, nats",
            ("log_probs", "train_log_probs", "proximal"),
        )
    )
    mask: Tensor = field(
        metadata=per_token(
            "the host's response mask, bool",
            ("loss_masks", "loss_mask", "mask"),
            missing=1.0,
            join=lambda mask: torch.from_numpy(mask.numpy() != 0),
        )
    )
    tokens: Tensor | None = field(
        default=None,
        metadata=per_token(
            "id, int64; -1 if unknown", ("tokens",), dtype=torch.int64, missing=UNKNOWN, read=response_ids
        ),
    )
    advantages: Tensor | None = field(
        default=None, metadata=per_token("advantage", ("advantages",), missing=0.0, repeats=True)
    )
    rewards: Tensor | None = field(
        default=None,
        metadata=per_sample(
            "raw reward, float64; NaN if missing",
            "reward",
            ("local_raw_reward", "reward", "rewards"),
            number,
            dumps=(ROLLOUT, TRAIN),
            join=as_floats,
        ),
    )
    versions: Tensor | None = field(
        default=None,
        metadata=per_token("version of the weights that sampled the token, int64; -1 if unknown", one=""),
    )
    newest: int | Tensor | None = None
    groups: tuple[int, ...] | None = field(
        default=None,
        metadata=per_sample(
            "number of the prompt", "group", ("group_index",), group_number, dumps=(ROLLOUT,)
        ),
    )
    steps: tuple[int, ...] | None = field(
        default=None,
        metadata=per_sample("optimizer step that trained the sample, counted from 0 in the rollout", "step"),
    )
    cached: tuple[int, ...] | None = field(
        default=None,
        metadata=per_sample(
            "number of prompt tokens that the engine took from its prefix cache",
            "cached",
            ("prefix_cache_info",),
            cached_tokens,
            dumps=(ROLLOUT,),
        ),
    )
    version_gaps: tuple[int, ...] | None = field(
        default=None,
        metadata=per_sample(
            "weight versions from the oldest to the newest that sampled it, 0 if it has one",
            "version_gap",
            ("weight_versions",),
            version_gap,
            dumps=(TRAIN, ROLLOUT),
        ),
    )
    ranks: tuple[int, ...] | None = field(
        default=None, metadata=per_sample("the trainer's data-parallel rank", "rank", ("data_parallel_rank",))
    )
    engines: Sequence[str] | None = field(
        default=None,
        metadata=per_sample(
            "name of the engine that sampled the sample; empty if unknown, None if no sample has one",
            "engine",
            (*ENGINES, ENGINE_RANK, "metadata"),
            missing="",
            read=engine_of,
            dumps=(ROLLOUT, TRAIN),
            join=lambda names: tuple(names) if any(names) else None,
        ),
    )
    statuses: Sequence[str] | None = field(
        default=None,
        metadata=per_sample(
            "how the sample ended, in the host's words (completed, truncated, aborted); empty if unknown",
            "status",
            ("status", "truncated"),
            missing="",
            read=status_of,
            dumps=(ROLLOUT, TRAIN),
            join=tuple,
        ),
    )
    places: tuple[int, ...] | None = field(
        default=None,
        metadata=per_sample("how many samples come before the sample in its micro-batch", "place"),
    )
    batches: tuple[int, ...] | None = field(
        default=None, metadata=per_sample("number of the sample's micro-batch in its rollout", "batch")
    )
    odd_experts: tuple[int, ...] | None = field(
        default=None,
        metadata=per_sample(
            "1 if the experts that the sampler recorded repeat or come again at other tokens", "odd_experts"
        ),
    )
    prompts: Sequence[str] | None = field(
        default=None,
        metadata=per_sample(
            "text; empty if missing", "prompt", ("prompt",), text, "", dumps=(ROLLOUT,), join=tuple
        ),
    )
    responses: Sequence[str] | None = field(
        default=None,
        metadata=per_sample(
            "text; empty if missing", "response", ("response",), text, "", dumps=(ROLLOUT,), join=tuple
        ),
    )
    entropy: Tensor | None = field(
        default=None, metadata=per_token("entropy of the trainer's policy at the token, nats", ("entropy",))
    )
    reference: Tensor | None = field(
        default=None, metadata=per_token("log-prob under the first policy, nats", ("ref_log_probs",))
    )
    kept: Tensor | None = field(
        default=None,
        metadata=per_token(
            "number of tokens that top-p or top-k kept; negative without the sampled token, NaN if unknown",
            ("rollout_top_p_token_ids",),
            read=kept_sizes,
            dumps=(TRAIN, ROLLOUT),
        ),
    )
    overlap: Tensor | None = field(
        default=None,
        metadata=per_token("share of the sampler's experts that the trainer chose too, mean over layers"),
    )
    kl: Tensor | None = field(
        default=None,
        metadata=per_token("KL(behavior || proximal) from the sampler's head, nats; NaN if unknown"),
    )
    tail: Tensor | None = field(default=None, metadata=per_token("probability of the tokens beyond the head"))
    sampler_head: Tensor | None = field(
        default=None,
        metadata=per_token(
            "[K] log-probs of the sampler's likeliest tokens, or of all that top-p kept, padded with NaN",
            one="",
        ),
    )
    trainer_head: Tensor | None = field(
        default=None, metadata=per_token("[K] the trainer's log-probs of the same tokens", one="")
    )
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
    is_repeated: bool = False
    notes: tuple[str, ...] = ()
    midway: float = 0.0
    joined: tuple[DumpedRollout, ...] = ()

    @property
    def rollouts(self) -> tuple[DumpedRollout, ...]:
        """The joined rollouts, or this one."""
        return self.joined or (self,)

    def share(self) -> None:
        """Gives each joined rollout its part of what was computed of all of them, as views."""
        token = sample = 0
        for one in self.joined:
            tokens, samples = slice(token, token + one.size), slice(sample, sample + one.count)
            names = dict.fromkeys(SHARED["token"], tokens) | dict.fromkeys(SHARED["sample"], samples)
            views = {name: vars(self)[name][..., cut] for name, cut in names.items() if name in vars(self)}
            vars(one).update(views)
            if "pairs" in vars(self):
                vars(one)["pairs"] = tuple(pair[tokens] for pair in self.pairs)
            within = vars(self.segments).get("within")
            if within is not None:
                vars(one.segments)["within"] = within[tokens]
            token, sample = tokens.stop, samples.stop

    def by_rollout(self, values: Tensor) -> Sequence[Tensor]:
        """Returns the values of each rollout: [T] -> several [tokens of a rollout]."""
        return values.split([one.size for one in self.joined]) if self.joined else (values,)

    def tabulate(
        self,
        table: Tensor,
        index: Tensor,
        rows: Sequence[Tensor] | Tensor,
        per: Literal["token", "sample"] = "token",
    ) -> None:
        """Adds K rows to a table [..., K], in place.

        Rollouts are added one after another, so the sums do not depend on whether they are joined.

        Args:
            index: which row of the table each token [T] or sample [S] counts in, where all dimensions but
                the last are flattened; a number behind the last row: it counts nowhere.
            rows: K tensors, [T] or [S].
        """
        flat = table.view(-1, table.shape[-1])
        if not self.joined:
            flat += tabulated(index, rows, len(flat))
            return
        counts = [one.size if per == "token" else one.count for one in self.joined]
        for sums in tabulated_apart(index, rows, len(flat), counts):
            flat += sums

    @property
    def count(self) -> int:
        """S, the number of samples."""
        return len(self.lengths)

    @property
    def size(self) -> int:
        """T, the number of response tokens."""
        return self.behavior.numel()

    @cached_property
    def response_lengths(self) -> Tensor:
        """``lengths`` as a tensor, [S] int64."""
        return self.segments.bounds.diff()

    @cached_property
    def segments(self) -> Segments:
        """The place of each sample in the packed tokens."""
        return Segments.whole(self.lengths, self.mask)

    @cached_property
    def _begins(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Which samples have a token, [S] bool, and the first token of each of these."""
        ends = self.segments.bounds.numpy()
        has_tokens = ends[1:] > ends[:-1]
        return has_tokens, ends[:-1][has_tokens]

    def reduced(self, reduce: numpy.ufunc, values: Tensor, empty: float) -> Tensor:
        """Reduces the values of each sample, [T] -> [S].

        Args:
            reduce: such as ``numpy.minimum``. It reads each value once and writes no temporary array.
            empty: the value of a sample without a token.
        """
        return torch.from_numpy(self._reduced(reduce, values.numpy(), empty))

    def _reduced(self, reduce: numpy.ufunc, values: numpy.ndarray, empty: float) -> numpy.ndarray:
        has_tokens, begins = self._begins
        if len(begins) == self.count:
            return reduce.reduceat(values, begins)
        results = numpy.full(self.count, empty, dtype=values.dtype)
        results[has_tokens] = reduce.reduceat(values, begins)
        return results

    def sums(self, rows: Iterable[Tensor]) -> Tensor:
        """Sums K rows over each sample: K tensors [T] -> [K, S] float64.

        It takes a third of the time of ``Segments.local_sums``, whose bits the hook needs.
        """
        sums = [self._reduced(numpy.add, row.double().numpy(), 0.0) for row in rows]
        return torch.from_numpy(numpy.stack(sums))

    def first_tokens(self, count: int) -> Tensor:
        """Returns the places of the first ``count`` tokens of each sample, [N] int64."""
        begins, lengths = self.segments.bounds[:-1].numpy(), self.response_lengths.numpy().clip(max=count)
        shifts = begins - (lengths.cumsum() - lengths)
        return torch.from_numpy(numpy.arange(lengths.sum()) + shifts.repeat(lengths))

    def samples_with(self, flags: Tensor) -> Tensor:
        """Returns the samples with at least one flagged token, [T] bool -> [S] bool."""
        return self.reduced(numpy.logical_or, flags, False)

    @cached_property
    def responding(self) -> Tensor:
        """The samples with a response token, [S] bool."""
        return self.samples_with(self.mask)

    @cached_property
    def prompt_ids(self) -> Tensor | None:
        """The prompt of each sample, counted from 0 in the rollout, [S] int64; None if it is not known."""
        return None if self.groups is None else integers(self.groups).unique(return_inverse=True)[1]

    @cached_property
    def ages(self) -> Tensor | None:
        """The age of the weights that sampled each token, in versions behind ``newest``, [T] float32.

        NaN if unknown; None if no age is known.
        """
        if self.versions is None or self.newest is None:
            return None
        newest = self.segments.expand(self.newest) if isinstance(self.newest, Tensor) else self.newest
        return torch.where(self.versions >= 0, (newest - self.versions).float(), torch.nan)

    @cached_property
    def masses(self) -> list[tuple[float, float]] | None:
        """The sum of A over response tokens with A > 0, and of |A| over those with A < 0, of each rollout.

        None without advantages.
        """
        return None if self.credit is None else [masses_of(one) for one in self.by_rollout(self.credit)]

    @cached_property
    def credit(self) -> Tensor | None:
        """The advantages, [T]; 0 at masked tokens. None if the dump lacks them."""
        return None if self.advantages is None else selected(self.advantages, self.mask)

    @cached_property
    def log_ratio(self) -> Tensor:
        """log proximal - log behavior of each token, [T], nats; 0 where ``finite`` is false."""
        return self.compared(log_ratio(self.proximal, self.behavior, self.mask))

    @cached_property
    def finite(self) -> Tensor:
        """The response tokens whose log-probs the hook can compare, [T] bool.

        The sampler's value is a log-prob, and the trainer's value is finite.
        """
        return self.mask & is_log_prob(self.behavior) & is_finite(self.proximal)

    @cached_property
    def is_zero(self) -> Tensor:
        """The tokens whose log-prob of the sampler is exactly 0, [T] bool; masked tokens, too."""
        return are_equal(self.behavior, 0)

    @cached_property
    def has_all(self) -> bool:
        """Whether ``finite`` is true at every token."""
        return count_true(self.finite) == self.size

    def compared(self, values: Tensor) -> Tensor:
        """Returns the values [T], with 0 where ``finite`` is false."""
        return values if self.has_all else selected(values, self.finite)

    @cached_property
    def probability(self) -> Tensor:
        """The probability of each token under the sampler, [T]; 1 where ``finite`` is false."""
        return self.compared(self.behavior).exp()

    @cached_property
    def surprise(self) -> Tensor:
        """The bin of -log behavior, [T] int32: two bins per decade from 1e-5 nats on."""
        surprise = (-self.compared(self.behavior)).clamp_(min=0).log10_().add_(5).mul_(2)
        return surprise.clamp_(0, SURPRISES - 1).int()

    @cached_property
    def columns(self) -> Tensor:
        """What is summed over tokens, [6, T] float64; 0 where ``finite`` is false.

        The rows are 1, |l|, l^2, l, k3, and k3 up to MOST_K3.
        """
        rows = torch.empty(6, self.size, dtype=torch.float64)
        count, absolute, squared, log_ratio_, distance, near = rows
        count.copy_(as_bytes(self.finite))
        log_ratio_.copy_(self.log_ratio)
        torch.abs(log_ratio_, out=absolute)
        torch.square(log_ratio_, out=squared)
        distance.copy_(k3(log_ratio_, self.ratio_minus_one))
        torch.clamp(distance, max=MOST_K3, out=near)
        return rows

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """1 and k3 up to MOST_K3, and |l| and l^2, as the parts of complex numbers, [T]; see ``Rows``."""
        count, absolute, squared, _, _, near = self.columns
        return torch.complex(count, near), torch.complex(absolute, squared)

    @cached_property
    def ratio_minus_one(self) -> Tensor:
        """e^l - 1 of each token, [T] float64; 0 where ``finite`` is false."""
        return torch.expm1(self.log_ratio.double())

    @cached_property
    def sample_sums(self) -> Tensor:
        """The sums of ``columns`` over each sample, [6, S] float64."""
        return self.segments.local_sums(self.columns)

    def oldest_versions(self) -> Tensor:
        """Returns the oldest version of the weights that sampled each sample, [S] float64; NaN if unknown."""
        if self.versions is None:
            return torch.full((self.count,), torch.nan, dtype=torch.float64)
        oldest = self.reduced(numpy.minimum, self.versions, UNKNOWN)
        return torch.where(oldest >= 0, oldest.double(), torch.nan)

    @cached_property
    def turns(self) -> Tensor:
        """The turn of each token in its sample, [T], counted from 0; meaningless at masked tokens."""
        if not self.size:
            return self.segments.turn_ids
        lengths = self.response_lengths
        firsts = (lengths.cumsum(0) - lengths).clamp(max=self.size - 1)  # also of samples without a token
        turns = self.segments.turn_ids
        return turns - self.segments.expand(turns[firsts] + (~self.mask[firsts]).long())

    def parts(self, limit: int = 1 << 17) -> Iterator[DumpedRollout]:
        """Yields the rollout in parts, so that temporary tensors stay small.

        A part has whole samples with at most ``limit`` tokens, or one longer sample. Its tensors are views.
        A small rollout is its only part, and so are joined rollouts.
        """
        if self.joined or (self.count and self.size <= limit):
            yield self
            return
        first, begin, end = 0, 0, 0
        for i, length in enumerate(self.lengths):
            if end > begin and end + length - begin > limit:
                yield self._part(first, i, begin, end)
                first, begin = i, end
            end += length
        if self.count:
            yield self._part(first, self.count, begin, end)

    def _part(self, first: int, last: int, begin: int, end: int) -> DumpedRollout:
        cuts = {"token": slice(begin, end), "sample": slice(first, last)}
        values = {row.name: (getattr(self, row.name), cuts[row.per]) for row in ROWS}
        return replace(self, **{name: None if v is None else v[cut] for name, (v, cut) in values.items()})

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


ROWS = rows_of(DumpedRollout)
# What a rollout computes once of each token, or of each sample, without looking at others.
SHARED = {
    "token": (
        "log_ratio",
        "finite",
        "is_zero",
        "probability",
        "surprise",
        "columns",
        "ratio_minus_one",
        "turns",
        "credit",
    ),
    "sample": ("sample_sums", "responding", "response_lengths"),
}


def form_of(rollout: DumpedRollout) -> tuple[object, ...]:
    """Returns which fields a rollout has, and of which form; rollouts of the same form can be joined."""
    values = (getattr(rollout, row.name) for row in ROWS)
    forms = ((v.dtype, v.shape[1:]) if isinstance(v, Tensor) else v is None for v in values)
    return rollout.newest is None, rollout.is_exact, *forms


def join(rollouts: Sequence[DumpedRollout]) -> DumpedRollout:
    """Packs the samples of small rollouts of one form as if they were of one rollout.

    So a measure reads them in one pass. Only ``rollouts`` has what is known of each rollout as a whole.
    """
    if len(rollouts) == 1:
        return rollouts[0]
    packed: dict[str, object] = {}
    for row in ROWS:
        values = [getattr(one, row.name) for one in rollouts]
        if isinstance(values[0], Tensor):
            packed[row.name] = torch.cat(values)
        elif values[0] is not None:
            packed[row.name] = tuple(chain.from_iterable(values))
    newest = None
    if rollouts[0].newest is not None:
        counts = torch.tensor([one.count for one in rollouts])
        newest = torch.tensor([one.newest for one in rollouts]).repeat_interleave(counts)
    return replace(rollouts[0], **packed, newest=newest, joined=tuple(rollouts))


def masses_of(advantages: Tensor) -> tuple[float, float]:
    """Returns the sum of A where A > 0, and of |A| where A < 0, in float64."""
    total, size = float(advantages.double().sum()), float(advantages.abs().double().sum())
    return (size + total) / 2, (size - total) / 2

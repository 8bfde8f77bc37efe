"""Sums what far tokens share: values, token ids, places at the end, neighbours, repetitions.

Also compares the log-probs that each side gives to the same text in several samples.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import Additive, earlier, run_begins, tabulated, zeros

FAR = 0.5  # nats, |l| of a token that is far off
IDS = 4096  # token ids are counted modulo this
ENDS = 16  # tokens from the end of a response; the last place holds all earlier tokens
SEEN = 4  # how often a token came before in its response: 0, 1, 2, more
VALUES = 8  # repeated values of which a part of a rollout keeps the counts
AGAIN = 3  # tokens with one value that make it a repeated value; 0 always counts as repeated
REACH = 3  # tokens on each side of one with a log-prob of exactly 0
UNLIKELY = -2.0  # nats, as in detector_statistics
PREFIX = 32  # first tokens of a response that are compared with other samples of its prompt
MIXER = 0x1E3779B97F4A7C15  # an odd number with irregular bits, for hashes
UNSURE = -1.0  # nats, a log-prob below which the sampler was unsure
SIZES, DECADES = 60, 6  # bins of |l|, from 1e-4 to 1e2 nats
COLUMNS = 4  # count, sum l, sum |l|, sum l^2, with |l| up to LARGEST
ROUNDING = 1e-4  # relative difference of sums over the same tokens in another order
LARGEST = 30.0  # nats; larger |l| count as this, so that no single token holds all of a sum


@dataclass
class SharedBy(Additive):
    """Sums of ``COLUMNS`` over tokens.

    Args:
        ids: [IDS, COLUMNS] by token id.
        unsure: the same of tokens at which the sampler was unsure.
        sizes: [SIZES] number of unsure tokens by bin of |l|.
        ends: [2, ENDS, COLUMNS] by place from the end, of responses that ended by themselves and of those
            that were cut at the limit.
        surprise: [SURPRISES, COLUMNS + 1] by bin of -log behavior; the last column is its sum.
        seen: [SEEN, SURPRISES, COLUMNS] by how often the token came before, and by bin of -log behavior.
        beside: [2, COLUMNS] of tokens whose log-prob is not 0, away from filled zeros and beside one.
        signs: [2, COLUMNS] of far tokens with l below and above 0.
        values: repeated log-prob of far tokens -> number of tokens.
        value_ids: the same -> largest number of different token ids in a part of a rollout.
        value_squares: the same -> sum l^2.
        twice: [2, 4] of tokens that another sample of their prompt has too, after the same text: their
            number, sum |behavior - mean|, sum |proximal - mean|, sum |l|. The second row has only tokens at
            which at least one side is unsure.
    """

    ids: Tensor = field(default_factory=lambda: zeros(IDS, COLUMNS))
    unsure: Tensor = field(default_factory=lambda: zeros(IDS, COLUMNS))
    sizes: Tensor = field(default_factory=lambda: zeros(SIZES))
    ends: Tensor = field(default_factory=lambda: zeros(2, ENDS, COLUMNS))
    surprise: Tensor = field(default_factory=lambda: zeros(SURPRISES, COLUMNS + 1))
    seen: Tensor = field(default_factory=lambda: zeros(SEEN, SURPRISES, COLUMNS))
    beside: Tensor = field(default_factory=lambda: zeros(2, COLUMNS))
    signs: Tensor = field(default_factory=lambda: zeros(2, COLUMNS))
    values: Counter[float] = field(default_factory=Counter)
    value_ids: Counter[float] = field(default_factory=Counter)
    value_squares: Counter[float] = field(default_factory=Counter)
    twice: Tensor = field(default_factory=lambda: zeros(2, 4))

    def add(self, part: DumpedRollout) -> None:
        """Adds the tokens of a part of a rollout."""
        if not part.size:
            return
        count, absolute, _, log_ratio, *_ = part.columns
        squared = absolute.clamp(max=LARGEST).square()
        rows = torch.stack([count, log_ratio.clamp(-LARGEST, LARGEST), absolute.clamp(max=LARGEST), squared])
        self.ends += tabulated(_place(part), rows, 2 * ENDS).view(2, ENDS, COLUMNS)
        far = part.finite & (absolute > FAR)
        self.signs += tabulated(torch.where(far, (log_ratio > 0).long(), 2), rows, 2)
        self.beside += tabulated(_beside(part), rows, 2)
        unsure = -part.compared(part.behavior).double()
        self.surprise += tabulated(part.surprise.long(), [*rows, unsure], SURPRISES)
        if part.tokens is not None:
            ids = part.tokens.remainder(IDS)
            self.ids += tabulated(ids, rows, IDS)
            is_unsure = part.finite & (part.behavior < UNSURE)
            self.unsure += tabulated(torch.where(is_unsure, ids, IDS), rows, IDS)
            self.sizes += torch.bincount(size_bin(absolute[is_unsure]), minlength=SIZES).double()
            came = earlier(part.segments.ids.long() * (1 << 32) + part.tokens).clamp(max=SEEN - 1)
            index = came * SURPRISES + part.surprise.long()
            self.seen += tabulated(index, rows, SEEN * SURPRISES).view(SEEN, SURPRISES, COLUMNS)
            self.twice += _twice(part)
        if far.any():
            self._add_values(part, far, squared)

    def _add_values(self, part: DumpedRollout, far: Tensor, squared: Tensor) -> None:
        behavior = part.behavior[far]
        values, index, counts = behavior.unique(return_inverse=True, return_counts=True)
        is_known = (counts >= AGAIN) | (values == 0)
        if not is_known.any():
            return
        kinds = part.proximal[far].mul(100).round().long() if part.tokens is None else part.tokens[far]
        pairs = torch.stack([index, kinds]).unique(dim=1)[0]
        different, squares = torch.bincount(pairs, minlength=len(values)), torch.zeros(len(values)).double()
        squares.index_add_(0, index, squared[far])
        top = (counts * is_known).topk(min(VALUES, len(counts))).indices
        for at in top[is_known[top]].tolist():
            value = float(values[at])
            self.values[value] += int(counts[at])
            self.value_ids[value] = max(self.value_ids[value], int(different[at]))
            self.value_squares[value] += float(squares[at])

    def merge(self, other: SharedBy) -> None:
        """Adds the sums of other parts, which may have the same token ids."""
        most = self.value_ids | other.value_ids
        super().merge(other)
        self.value_ids = most

    def fewest_ids(self, value: float) -> int:
        """Returns a lower bound of the number of different token ids with a value.

        It is the number in one part, or the fewest ids whose sum l^2 reaches that of the value.
        """
        reached = self.ids[:, 3].sort(descending=True).values.cumsum(0)
        needed = int((reached < (1 - ROUNDING) * self.value_squares[value]).sum()) + 1
        return max(self.value_ids[value], min(needed, int((self.ids[:, 3] > 0).sum())))

    @property
    def total(self) -> Tensor:
        """The sums over all tokens, [COLUMNS]."""
        return self.ends.sum((0, 1))


def size_bin(absolute: Tensor) -> Tensor:
    """Returns the bin of ``sizes`` of each |l| [N], nats.

    >>> size_bin(torch.tensor([0.0, 1e-4, 0.01, 1.0])).tolist()
    [0, 0, 20, 40]
    """
    at = absolute.clamp_min(1e-30).log10() * SIZES / DECADES + 4 * SIZES / DECADES
    return at.round(decimals=6).floor().long().clamp(0, SIZES - 1)


def _place(part: DumpedRollout) -> Tensor:
    """Returns the row of ``ends`` of each token, [T]."""
    lengths = torch.tensor(part.lengths)
    from_end = (part.segments.expand(lengths) - 1 - part.segments.within).clamp(max=ENDS - 1)
    cut = torch.tensor([status == "truncated" for status in part.statuses or [""] * part.count])
    return part.segments.expand(cut.long()) * ENDS + from_end


def _beside(part: DumpedRollout) -> Tensor:
    """Returns the row of ``beside`` of each token, [T]; 2 if its log-prob is exactly 0."""
    zero = part.mask & (part.behavior == 0)
    filled = zero & (part.proximal < UNLIKELY)
    near, ids = filled.clone(), part.segments.ids
    for step in range(1, REACH + 1):
        same = ids[step:] == ids[:-step]
        near[step:] |= filled[:-step] & same
        near[:-step] |= filled[step:] & same
    return torch.where(zero, 2, near.long())


def _twice(part: DumpedRollout) -> Tensor:
    """Returns the numbers of ``SharedBy.twice`` for one part, [2, 4]."""
    if part.groups is None:
        return zeros(2, 4)
    segments = part.segments
    at = ((segments.within < PREFIX) & part.finite).nonzero()[:, 0]
    if not len(at):
        return zeros(2, 4)
    mixed = (part.tokens + 1) * MIXER * (2 * segments.within + 1)
    mixed = (mixed ^ (mixed >> 31)) * MIXER
    sums = mixed.cumsum(0)  # modulo 2^64
    lengths = torch.tensor(part.lengths)
    before = torch.cat([sums.new_zeros(1), sums])[lengths.cumsum(0) - lengths]
    prompts = torch.tensor(part.groups) * 131 + torch.tensor(part.prompt_lengths)
    keys = (sums - segments.expand(before) + segments.expand(prompts * MIXER))[at]
    order = keys.argsort(stable=True)
    at, keys = at[order], keys[order]
    begins = run_begins(keys)
    sizes = begins.diff(append=begins.new_tensor([len(keys)]))
    both = torch.stack([part.behavior[at].double(), part.proximal[at].double()])
    run = torch.repeat_interleave(sizes)
    means = torch.zeros(2, len(begins), dtype=torch.float64).index_add_(1, run, both) / sizes
    apart = (both - means[:, run]).abs()
    is_again = sizes[run] > 1
    rows = torch.stack([torch.ones(len(at)).double(), *apart, part.log_ratio[at].double().abs()], 1)
    unsure = is_again & (both.amin(0) < -0.05)
    return torch.stack([rows[is_again].sum(0), rows[unsure].sum(0)])

"""Where within samples the policies part: by absolute position, by turn, from a place on; kept sets,
experts, and who was dropped. All of it adds up over rollouts and processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from slime_ext.analysis.records import DumpedRollout

BLOCK, BLOCKS = 16, 2048  # absolute positions (prompt and response) in a block; the last holds all beyond
LONG_RUNS = 4  # tokens; shorter runs are not worth their sums
NEAR = 8  # tokens that are the begin of a turn
PARTS = ("begin of the first turn", "rest of the first turn", "begin of later turns", "rest of later turns")
LATER = (-2, -1, 1, 2)  # tokens by which log-probs may lie elsewhere from some place of a turn on
CLOSER, SURE, BOTH = 0.3, 3.0, 6  # see ``_moved``
EXACT = 1e-3  # nats
FAR = 0.1  # nats, mean |l| of a turn
ABOUT = ("count", "length", "length2", "reward", "reward2", "position", "position2")


def _table(*size: int) -> Tensor:
    return torch.zeros(*size, dtype=torch.float64)


@dataclass
class Structure:
    """Sums over tokens and samples.

    ``blocks`` [BLOCKS, 3] count, sum |l|, sum l^2 by absolute position; ``turns`` [4, 3] the same by PARTS.
    ``counts``: turns; ``moved`` turns of which a later part fits log-probs a few places away and an earlier
    one its own; of positions with a kept set ``known``, ``outside`` (the sampled token is none of the set),
    ``alone`` (the set is one token), ``alone_sampler`` and ``alone_trainer`` (of these, with a log-prob of
    0), ``mass`` (sum of the ratio); ``retold`` samples with other tokens in the two dumps. ``routes``
    [layers, 2] and ``experts`` [experts, 2] as in ``DumpedRollout``; ``agreed`` [2, 3] count, sum |l|, sum
    l^2 of tokens with all experts the same, and of the others. ``fates`` [2, 7] sums of ABOUT over kept and
    dropped samples.
    """

    blocks: Tensor = field(default_factory=lambda: _table(BLOCKS, 3))
    turns: Tensor = field(default_factory=lambda: _table(len(PARTS), 3))
    counts: Counter[str] = field(default_factory=Counter)
    routes: Tensor = field(default_factory=lambda: _table(0, 2))
    experts: Tensor = field(default_factory=lambda: _table(0, 2))
    agreed: Tensor = field(default_factory=lambda: _table(2, 3))
    fates: Tensor = field(default_factory=lambda: _table(2, len(ABOUT)))

    def add(self, part: DumpedRollout) -> None:
        """Adds the tokens of a part of a rollout."""
        if not part.mask.any():
            return
        finite, found = part.finite, part.compared(part.log_ratio).double().abs()
        values = torch.stack([torch.ones_like(found), found, found.square()])
        within = part.segments.within
        absolute = within + torch.tensor(part.prompt_lengths)[part.segments.ids]
        block = absolute.div(BLOCK, rounding_mode="floor").clamp(0, BLOCKS - 1)
        self.blocks += tabulated(part.compared(block), values, BLOCKS)
        self.turns += tabulated(part.compared(_parts(part)), values, len(PARTS))
        self.counts["turns"] += int(part.segments.turn_ids[-1])
        if far := _far_turns(part):
            self.counts["moved"] += max(_moved(far, shift) for shift in LATER)
        if part.kept is not None:
            self.counts.update(_kept(part))
        if part.overlap is not None:
            known = finite & part.overlap.isfinite()
            apart = (part.overlap[known] < 1).long()
            self.agreed += tabulated(apart, values[:, known[finite]], 2)

    def close(self, rollout: DumpedRollout) -> None:
        """Adds what is known of a whole rollout."""
        self.counts["retold"] += rollout.retold
        if rollout.routes is not None:
            self.routes = _sum(self.routes, rollout.routes.double())
            self.experts = _sum(self.experts, rollout.experts)
        if rollout.rewards is None or rollout.dropped is None:
            return
        lengths = torch.tensor(rollout.lengths, dtype=torch.float64)
        mine = torch.stack([lengths, rollout.rewards, torch.tensor(rollout.positions).double()], 1)
        is_trained = rollout.segments.any(rollout.mask) & rollout.rewards.isfinite()
        masked_out = mine[~is_trained & rollout.rewards.isfinite()]
        self.fates += torch.stack(
            [_about(mine[is_trained]), _about(torch.cat([masked_out, rollout.dropped]))]
        )

    def merge(self, other: Structure) -> None:
        """Adds the sums over other rollouts."""
        self.counts.update(other.counts)
        for name in ("blocks", "turns", "routes", "experts", "agreed", "fates"):
            setattr(self, name, _sum(getattr(self, name), getattr(other, name)))


def tabulated(index: Tensor, values: Sequence[Tensor] | Tensor, size: int) -> Tensor:
    """Sums of K rows of values [N] by their index [N], [size, K]. Neighbours of one index, of which most axes
    have long runs, are added up first."""
    if not len(index):
        return values[0].new_zeros(size, len(values))
    begins = torch.cat([index.new_ones(1, dtype=torch.bool), index[1:] != index[:-1]]).nonzero()[:, 0]
    if LONG_RUNS * len(begins) < len(index):
        index = index[begins]
        values = [torch.from_numpy(numpy.add.reduceat(v.numpy(), begins.numpy())) for v in values]
    return torch.stack([torch.bincount(index, weights=v, minlength=size) for v in values], 1)


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two tables, of which one may have more rows."""
    out = _table(max(len(a), len(b)), a.shape[1])
    out[: len(a)] += a
    out[: len(b)] += b
    return out


def _about(rows: Tensor) -> Tensor:
    """[D, 3] length, reward and position -> sums of ABOUT."""
    length, reward, position = rows.unbind(1)
    known = (length, length.square(), reward, reward.square(), position, position.square())
    sums = [values.sum() for values in known]
    count = torch.tensor(float(len(rows)), dtype=torch.float64)
    return torch.stack([count, *sums])


def _parts(part: DumpedRollout) -> Tensor:
    """[T] which of PARTS each response token is in."""
    turns, ids = part.segments.turn_ids, part.segments.ids
    begins = (turns.diff(prepend=turns.new_zeros(1)) > 0).nonzero()[:, 0]  # of each turn, from the first on
    is_begin = torch.arange(part.size) - begins[(turns - 1).clamp_min(0)] < NEAR
    firsts = torch.tensor(part.lengths).cumsum(0) - torch.tensor(part.lengths)
    firsts = firsts.clamp(max=part.size - 1)  # of samples without a token
    lowest = turns[firsts] + (~part.mask[firsts]).long()
    return 2 * (turns > lowest[ids]).long() + (~is_begin).long()


def _far_turns(part: DumpedRollout) -> DumpedRollout | None:
    """The part if any turn of it is so far off that log-probs may lie elsewhere: most never are, and to look
    takes time."""
    total = torch.bincount(part.segments.turn_ids, part.log_ratio.abs())
    count = torch.bincount(part.segments.turn_ids, part.finite)
    return part if bool((total > FAR * count).any()) else None


def _moved(part: DumpedRollout, shift: int) -> int:
    """In how many turns the trainer's log-probs fit those of the sampler ``shift`` places away from some
    token on, significantly better than their own, and their own before it in the same sample."""
    count, turns, s = int(part.segments.turn_ids[-1]) + 1, part.segments.turn_ids, abs(shift)
    if part.size <= s or count == 1:
        return 0
    near, far = (slice(None, -s), slice(s, None)) if shift > 0 else (slice(s, None), slice(None, -s))
    both = part.finite[near] & part.finite[far] & (turns[near] == turns[far])
    own = part.log_ratio.double().abs()[near][both]
    moved = (part.proximal[near][both].double() - part.behavior[far][both]).abs()
    turn, sample = turns[near][both], part.segments.ids[near][both].long()
    if not len(own):
        return 0
    gain = own - moved
    before = gain.cumsum(0) - gain  # over all tokens ahead
    lowest = torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce(0, turn, before, "amin")
    at = torch.arange(len(gain))
    is_best = before <= lowest[turn]
    place = torch.full((count,), len(gain)).scatter_reduce(0, turn[is_best], at[is_best], "amin")
    is_late = at >= place[turn]
    columns = torch.stack([torch.ones_like(own), own, moved, gain.square()])
    n, distance, closer, square = tabulated(turn[is_late], columns[:, is_late], count).unbind(1)
    fits = (n >= BOTH) & (closer < CLOSER * distance) & (distance - closer >= SURE * square.sqrt())
    sums = torch.cat([_table(4, 1), columns.cumsum(1)], 1)
    begin = torch.full((part.count,), len(gain)).scatter_reduce(0, sample, at, "amin")
    of_turn = torch.zeros(count, dtype=torch.int64).scatter(0, turn, sample)
    earlier = sums[:, place.clamp(max=len(gain))] - sums[:, begin[of_turn]]
    return int((fits & (earlier[0] >= BOTH) & (earlier[1] < CLOSER * earlier[2])).sum())


def _kept(part: DumpedRollout) -> dict[str, float]:
    known = part.finite & part.kept.isfinite()
    alone = known & (part.kept.abs() == 1)
    counted = {
        "known": known,
        "outside": known & (part.kept < 0),
        "alone": alone,
        "alone_sampler": alone & (part.behavior > -EXACT),
        "alone_trainer": alone & (part.proximal > -EXACT),
    }
    found = {name: int(flags.sum()) for name, flags in counted.items()}
    return found | {"mass": float(part.log_ratio[known].double().clamp(max=2.0).exp().sum())}

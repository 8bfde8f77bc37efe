"""Sums tokens and sequences, from which k3, chi^2 and effective sample sizes follow.

Sums add up over parts of a rollout, rollouts and processes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.ops.divergences import is_log_prob
from slime_ext.tools.analysis.document import Bin, Numbers
from slime_ext.tools.analysis.measures.histogram import Histogram
from slime_ext.tools.analysis.records import TOKEN_COLUMNS, DumpedRollout

LEVELS = ("sequence", "geometric")


def _logs() -> Tensor:
    return torch.full((len(LEVELS), 2), -torch.inf, dtype=torch.float64)


@dataclass
class Sums:
    """Sums over tokens and sequences of a rollout, or of a run.

    Args:
        values: name -> sum, as ``_sums`` names them.
        logs: [2, 2] float64, logs of sum x and sum x^2 over sequences, for the sequence and the geometric
            level. x is the importance ratio of the level, which may overflow where its log does not.
        histogram: of log-ratios.
    """

    values: Counter[str] = field(default_factory=Counter)
    logs: Tensor = field(default_factory=_logs)
    histogram: Histogram = field(default_factory=Histogram)

    def add(self, part: DumpedRollout) -> None:
        """Adds the tokens and sequences of a part of a rollout."""
        self.values.update(_sums(part))
        self.histogram.add(part.log_ratio if part.has_all else part.log_ratio[part.finite])
        self.logs = torch.logaddexp(self.logs, _log_sums(part))

    def merge(self, other: Sums) -> None:
        """Adds the sums over other tokens."""
        self.values.update(other.values)
        self.histogram.merge(other.histogram)
        self.logs = torch.logaddexp(self.logs, other.logs)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def mean(self, name: str, over: str = "finite") -> float | None:
        """Returns a sum divided by the sum that ``over`` names; None if that is 0.

        By default it is divided by the number of tokens with both log-probs.
        """
        return self[name] / self[over] if self[over] else None

    def numbers(self) -> Numbers:
        """Returns the numbers that follow from the sums."""
        count = self["finite"]
        always = Numbers(
            tokens=int(self["tokens"]),
            sequences=int(self["sequences"]),
            nonfinite=int(self["tokens"] - count),
            reward=self.mean("reward", "rewarded"),
            response_length=self.mean("length", "sequences"),
            staleness=self.mean("age", "aged"),
            kl=self.mean("kl", "headed"),
            tail=self.mean("tail", "headed"),
        )
        return always.model_copy(update=self._compared(count)) if count else always

    def _compared(self, count: float) -> dict[str, float | None]:
        first, second = self["ratio"], self["ratio_squared"]
        return dict(
            mean=self.mean("log_ratio"),
            absolute=self.mean("absolute"),
            k3=self.mean("k3"),
            log_ratio_max=max(self.histogram.largest, -self.histogram.smallest),
            differing_fraction=self.mean("differing"),
            chi2_token=second / count - 1,
            chi2_sequence=self._chi2("sequence"),
            ess_token=_ess_token(first, second, count),
            ess_geometric=self._ess("geometric"),
            ess_sequence=self._ess("sequence"),
            perplexity_behavior=_exp(-(self.mean("behavior") or 0)),
            perplexity_proximal=_exp(-(self.mean("proximal") or 0)),
            **{f"ratio_p{q:02d}": _exp(self.histogram.quantile(q / 100)) for q in (1, 50, 99)},
        )

    def distribution(self) -> tuple[Bin, ...]:
        """Returns the histogram in bars, from the first to the last with a token."""
        return tuple(Bin(low=low, high=high, count=count) for low, high, count in self.histogram.bars())

    def _chi2(self, level: str) -> float | None:
        second = float(self.logs[LEVELS.index(level), 1])
        return _exp(second - math.log(self["compared"])) - 1 if math.isfinite(second) else None

    def _ess(self, level: str) -> float | None:
        first, second = self.logs[LEVELS.index(level)].tolist()
        return math.exp(2 * first - second - math.log(self["compared"])) if math.isfinite(second) else None


def _sums(part: DumpedRollout) -> dict[str, float]:
    mask, finite, columns = part.mask, part.finite, dict(zip(TOKEN_COLUMNS, part.columns, strict=True))
    ratio = columns["log_ratio"].exp() * columns.pop("count")
    sums = {
        "tokens": mask,  # response tokens
        "finite": finite,  # response tokens with both log-probs
        "no_behavior": mask & ~is_log_prob(part.behavior),
        "no_proximal": mask & ~(part.proximal.abs() < torch.inf),
        **columns,
        "differing": part.log_ratio != 0,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "behavior": part.compared(part.behavior).double(),
        "proximal": part.compared(part.proximal).double(),
        "sequences": part.responding,
        "compared": part.samples_with(finite),
        "length": torch.tensor(part.lengths, dtype=torch.float64)[part.responding],
    }
    if part.rewards is not None:
        is_known = part.rewards.isfinite()
        rewards = part.rewards[is_known].double()
        sums |= {"rewarded": is_known, "reward": rewards, "reward_squared": rewards.square()}
    if part.ages is not None:
        is_known = mask & (part.ages >= 0)
        sums |= {"aged": is_known, "age": torch.where(is_known, part.ages, 0).double()}
    if part.kl is not None:
        is_known = mask & part.kl.isfinite()
        kl, tail = (torch.where(is_known, x, 0).double() for x in (part.kl, part.tail))
        sums |= {"headed": is_known, "kl": kl, "tail": tail}
    if part.reference is not None:
        is_known = finite & part.reference.isfinite()
        apart = ((side - part.reference).abs().double() for side in (part.behavior, part.proximal))
        pushed, moved = (torch.where(is_known, distance, 0) for distance in apart)
        unmoved = is_known & (part.proximal == part.reference) & (part.proximal != 0)
        sums |= {"referenced": is_known, "pushed": pushed, "moved": moved, "unmoved": unmoved}
    return {
        name: float(row.count_nonzero() if row.dtype == torch.bool else row.sum())
        for name, row in sums.items()
    }


def _log_sums(part: DumpedRollout) -> Tensor:
    """Returns the ``logs`` of ``Sums`` for one part, [2, 2]."""
    total, count = part.segments.local_sums([part.log_ratio, part.finite.to(part.log_ratio.dtype)])
    levels = torch.stack([total, total / count])[:, count > 0]
    return torch.stack([levels.logsumexp(1), (2 * levels).logsumexp(1)], 1)


def _ess_token(first: float, second: float, count: float) -> float | None:
    """Returns the effective sample size from the sums of the ratio and its square.

    It is that of one token if the square overflows, and None if it underflows.
    """
    if not second:
        return None
    return 1 / count if math.isinf(second) else first / count * (first / second)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf

"""What would a correction have done: every preset applied to the rollouts of a dump, as the hook would.

A dump holds the behavior and the proximal policy, not the target: the target is taken to be the proximal
policy, which holds at the first optimizer step of a rollout. A correction with numerator target is therefore
seen as it acts on mismatch and staleness, without the drift of later steps of the same rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slime_ext import presets
from slime_ext.analysis.document import Effect
from slime_ext.analysis.quantiles import BitHistogram
from slime_ext.analysis.records import Rollout
from slime_ext.correction import Correction, Outcome, Tokens
from slime_ext.objectives import Bounds, Host
from slime_ext.ops.segments import Segments

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
BOUNDS = Bounds()  # slime's --eps-clip
NO_ADVANTAGES = "needs advantages, which the dump does not hold"


@dataclass(frozen=True)
class Applied:
    """What a correction does to each response token, [T] each, 0 or False at masked ones."""

    weights: Tensor  # multiplies the loss; 0 at rejected tokens
    keep: Tensor  # bool, stays in the policy loss
    clipped: Tensor  # bool, where a bound changed a weight, or the surrogate clipped
    slope: Tensor | None  # d loss / d log target where target = proximal; None without advantages


def apply(correction: Correction, rollout: Rollout, bounds: Bounds = BOUNDS) -> Applied:
    """What the hook would do to a rollout, optimizer step by optimizer step.

    Args:
        bounds: the host's clip range, for surrogates that name none of their own.
    """
    if not correction.is_coupled or len(set(rollout.steps or ())) < 2:
        return _applied(correction, rollout.tokens_of(), bounds)
    whole = rollout.tokens_of()
    parts = [(at, _applied(correction, part, bounds)) for at, part in _steps_of(rollout, whole)]
    order = torch.cat([at for at, _ in parts]).argsort()

    def joined(name: str) -> Tensor | None:
        values = [getattr(applied, name) for _, applied in parts]
        return None if values[0] is None else torch.cat(values)[order]

    return Applied(*(joined(name) for name in ("weights", "keep", "clipped", "slope")))


def _steps_of(rollout: Rollout, tokens: Tokens) -> Iterator[tuple[Tensor, Tokens]]:
    """The tokens of each optimizer step, and where they lie in the rollout."""
    lengths = torch.tensor(rollout.lengths)
    of_sample = torch.tensor(rollout.steps)
    of_token = of_sample.repeat_interleave(lengths)
    for step in of_sample.unique():
        at = (of_token == step).nonzero()[:, 0]
        segments = Segments.whole(lengths[of_sample == step].tolist(), rollout.mask[at])
        fields = {
            name: None if (values := getattr(tokens, name)) is None else values[at]
            for name in ("proximal", "behavior", "target", "advantages")
        }
        yield at, replace(tokens, segments=segments, **fields)


def _applied(correction: Correction, tokens: Tokens, bounds: Bounds) -> Applied:
    mask = tokens.segments.mask
    if correction.is_identity:  # the hook hands the host's loss back, whatever stands in it
        slope = None if tokens.advantages is None else -tokens.segments.zeroed(tokens.advantages)
        return Applied(mask.to(tokens.proximal.dtype), mask, torch.zeros_like(mask), slope)
    outcome = correction(tokens, observe=True)
    clipped = outcome.clipped & outcome.finite
    if tokens.advantages is None:
        return Applied(outcome.weights, outcome.keep, clipped, None)
    if isinstance(correction.surrogate, Host):  # its slope at ratio 1 is -A
        slope = torch.where(outcome.keep, -tokens.advantages * outcome.weights, 0)
        return Applied(outcome.weights, outcome.keep, clipped, slope)
    slope, by_loss = _slope(correction, outcome, tokens, bounds)
    return Applied(outcome.weights, outcome.keep, clipped | by_loss, slope)


def _slope(correction: Correction, outcome: Outcome, tokens: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
    target = tokens.proximal.detach().clone().requires_grad_()
    followed = replace(tokens, target=target)
    loss, clipped = correction.loss(outcome, followed, torch.zeros_like(target), bounds)
    (slope,) = torch.autograd.grad(loss.sum(), target)
    return slope, clipped


@dataclass
class Tally:
    """What a correction does, added up over rollouts; two tallies of the same correction merge."""

    correction: Correction
    without_advantages: int = 0
    tokens: int = 0
    kept_tokens: int = 0
    sequences: int = 0
    kept_sequences: int = 0
    clipped_tokens: int = 0
    sums: Tensor = field(default_factory=lambda: torch.zeros(8, dtype=torch.float64))
    weights: BitHistogram = field(default_factory=BitHistogram)
    rejected: dict[str, str] = field(default_factory=dict)

    def add(self, rollout: Rollout) -> None:
        """Counts one rollout, or some whole samples of one."""
        if rollout.advantages is None and _reads_advantages(self.correction):
            self.without_advantages += 1
            return
        applied = apply(self.correction, rollout)
        self.tokens += int(rollout.mask.sum())
        self.kept_tokens += int(applied.keep.sum())
        self.clipped_tokens += int(applied.clipped.sum())
        self.sums += _sums(applied, rollout)
        self.weights.add(applied.weights[applied.keep])
        self._sequences(applied.keep, rollout)

    def merge(self, other: Tally) -> None:
        """Adds what another tally counted."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.sums += other.sums
        self.weights.merge(other.weights)
        for rollout, positions in other.rejected.items():
            self._remember(rollout, positions)

    def _sequences(self, keep: Tensor, rollout: Rollout) -> None:
        has = rollout.segments.any(torch.ones_like(keep))
        kept = rollout.segments.any(keep)
        self.sequences += int(has.sum())
        self.kept_sequences += int(kept.sum())
        gone = [rollout.positions[i] for i in (has & ~kept).nonzero()[:, 0].tolist()]
        if gone:
            self._remember(str(rollout.rollout_id), spans(sorted(gone)))

    def _remember(self, rollout: str, positions: str) -> None:
        before = self.rejected.get(rollout)
        self.rejected[rollout] = positions if before is None else f"{before},{positions}"

    def effect(self, name: str, formula: str = "", source: str = "") -> Effect:
        """The numbers for the page."""
        plain = {"name": name, "formula": formula, "source": source, "numerator": self.correction.numerator}
        if not self.tokens:
            why = NO_ADVANTAGES if self.without_advantages else "the dump holds no response token"
            return Effect(**plain, unavailable=why)
        weight, square, up, up_kept, down, down_kept, slope, advantage = self.sums.tolist()
        return Effect(
            **plain,
            **{key: getattr(self, key) for key in COUNTS if key in Effect.model_fields},
            weight_mean=weight / self.kept_tokens if self.kept_tokens else None,
            weight_quantiles=self._quantiles(),
            ess=weight * weight / (self.tokens * square) if square else 0.0,
            kept_positive=up_kept / up if up else None,
            kept_negative=down_kept / down if down else None,
            gradient_scale=slope / advantage if advantage else None,
            rejected=self.rejected,
        )

    def _quantiles(self) -> dict[str, float]:
        found = self.weights
        if not self.kept_tokens:
            return {}
        middle = {name: found.quantile(q) for name, q in QUANTILES.items()}
        return {"min": found.smallest, **middle, "max": found.largest}


COUNTS = (
    "without_advantages",
    "tokens",
    "kept_tokens",
    "sequences",
    "kept_sequences",
    "clipped_tokens",
)


class WhatIf:
    """Tallies of several corrections over the same rollouts.

    Args:
        corrections: name -> correction; all presets when None.
    """

    def __init__(self, corrections: Mapping[str, Correction] | None = None) -> None:
        chosen = corrections or {name: p.correction for name, p in presets.PRESETS.items()}
        self.tallies = {name: Tally(correction) for name, correction in chosen.items()}
        self.stopped: list[int] = []  # rollouts at which every hook stops the run

    def add(self, rollout: Rollout) -> None:
        """Applies every correction to one rollout; one with a non-finite proximal log-prob is left out."""
        if not rollout.proximal[rollout.mask].isfinite().all():
            self.stopped.append(rollout.rollout_id)
            return
        alone, coupled = [], []
        for tally in self.tallies.values():
            (coupled if tally.correction.is_coupled else alone).append(tally)
        for part in rollout.parts():  # what is computed of one stays small
            for tally in alone:
                tally.add(part)
        for tally in coupled:
            tally.add(rollout)

    def merge(self, other: WhatIf) -> None:
        """Adds what another one counted, of other rollouts and the same corrections."""
        for name, tally in self.tallies.items():
            tally.merge(other.tallies[name])
        self.stopped += other.stopped

    def effects(self) -> tuple[Effect, ...]:
        """One row per correction, in the order in which they were given."""
        return tuple(tally.effect(name, *_described(name)) for name, tally in self.tallies.items())


def whatif(
    rollouts: Iterable[Rollout], corrections: Mapping[str, Correction] | None = None
) -> tuple[Effect, ...]:
    """The effects of corrections (all presets when None) on rollouts, one after the other."""
    found = WhatIf(corrections)
    for rollout in rollouts:
        found.add(rollout)
    return found.effects()


def spans(numbers: list[int]) -> str:
    """Sorted integers as ranges.

    >>> spans([0, 1, 2, 7, 9, 10])
    '0-2,7,9-10'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def _sums(applied: Applied, rollout: Rollout) -> Tensor:
    """sum w, sum w^2, sum A and kept sum A over A > 0, the same of |A| over A < 0, sum |slope|, sum |A|."""
    weights = applied.weights.double()
    first = [weights.sum(), weights.square().sum()]
    if rollout.advantages is None:
        return torch.cat([torch.stack(first), weights.new_zeros(6)])
    advantages = rollout.segments.zeroed(rollout.advantages).double()
    kept = torch.where(applied.keep, advantages, 0)
    signed = [x.clamp(min=0).sum() for x in (advantages, kept, -advantages, -kept)]
    return torch.stack([*first, *signed, applied.slope.double().abs().sum(), advantages.abs().sum()])


def _reads_advantages(correction: Correction) -> bool:
    """Whether weights or keep depend on advantages; a surrogate alone only loses its slope without them."""
    return any(step.reads_advantages for step in correction.steps)


def _described(name: str) -> tuple[str, str]:
    known = presets.PRESETS.get(name)
    return (known.formula, known.source) if known else ("", "")

"""Reads what our runs measured (evidence.yaml), and selects what applies to a run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Literal

import yaml

from slime_ext.tools.analysis.document import FrozenModel
from slime_ext.tools.analysis.texts import counted

Mismatch = Literal["lag", "formats"]  # the sampler has older weights, or only other number formats


class Remedy(FrozenModel):
    """One way to train under a condition, compared with uncorrected runs of the same seeds.

    Attributes:
        arm: the letter of the arm in benchmarks/evidence/settings.yaml.
        preset: the name of the correction, None if it is not a preset.
        end: the mean held-out score at the end, over the seeds of this arm.
        effect, low, high: the mean difference from uncorrected runs, and its 95% interval; ``seeds`` is the
            number of pairs.
        p: of the randomisation test of pairs, adjusted by Holm over the condition.
        planned: panel -> p of the test that was written down before the panel ran.
    """

    arm: str
    remedy: str
    preset: str | None
    seeds: int
    end: float
    effect: float
    low: float
    high: float
    p: float
    planned: dict[str, float]

    def __str__(self) -> str:
        return f"{self.remedy} {self.gain}"

    @property
    def gain(self) -> str:
        """The effect, its interval and the number of seeds as text."""
        effect, interval = self.rounded
        return f"{effect} ({interval}, {counted(self.seeds, 'seed')})"

    @property
    def rounded(self) -> tuple[str, str]:
        """The effect, and its interval, as text."""
        effect, low, high = (round(x, 2) + 0.0 for x in (self.effect, self.low, self.high))  # no -0.00
        return f"{effect:+.2f}", f"{low:.2f} to {high:.2f}"

    @property
    def helped(self) -> bool:
        """Whether these runs ended significantly above the uncorrected runs."""
        return self.p < evidence().significance and self.effect > 0

    @property
    def did_harm(self) -> bool:
        """Whether these runs ended significantly below the uncorrected runs."""
        return self.p < evidence().significance and self.effect < 0


class Uncorrected(FrozenModel):
    """The uncorrected runs, with which the others are compared."""

    seeds: int
    end: float


class Condition(FrozenModel):
    """Runs that differ only in how they train, and in their seeds.

    Attributes:
        scored: the weights that answered the held-out questions; empty: the engine had the trainer's.
        k3: the smallest and the largest k3 of the uncorrected runs, where the k3 of a run is its median over
            rollouts; empty: unknown.
        rollouts_per_push: rollouts from one push of weights to the next; 1: no lag.
        post_hoc: whether these comparisons were chosen after the results were known.
    """

    name: str
    mismatch: Mismatch
    what: str
    scored: str
    panels: tuple[str, ...]
    steps_per_rollout: int
    rollouts_per_push: int
    k3: tuple[float, ...]
    post_hoc: bool
    uncorrected: Uncorrected
    remedies: tuple[Remedy, ...]

    @property
    def whose(self) -> str:
        """The end of a sentence that names the scored weights; empty if ``scored`` is."""
        return f"; scored with {self.scored}" if self.scored else ""

    @property
    def range(self) -> str:
        """The range of k3 as text."""
        return " to ".join(f"{bound:.2g}" for bound in self.k3)

    def of(self, preset: str) -> Remedy | None:
        """Returns the result of a preset under this condition; None if it was not run."""
        return next((remedy for remedy in self.remedies if remedy.preset == preset), None)


class Evidence(FrozenModel):
    """The content of evidence.yaml."""

    significance: float
    conditions: tuple[Condition, ...]

    def at(
        self, mismatch: Mismatch, k3: float | None, steps: int | None, rollouts_per_push: int | None
    ) -> tuple[Condition, ...]:
        """Returns the conditions that a run meets; none if we measured nothing like it.

        Several conditions apply if their ranges of k3 overlap: the same runs were scored with two sets of
        weights, or the run does not tell what decides.

        Args:
            k3: the run's median over rollouts, nats per token.
            steps: optimizer steps per rollout; None: unknown, which fits any condition.
            rollouts_per_push: as in a condition; None: unknown, which fits any.
        """
        return tuple(
            condition
            for condition in self.measured(mismatch)
            if k3 is not None
            and condition.k3[0] <= k3 <= condition.k3[1]
            and steps in (None, condition.steps_per_rollout)
            and rollouts_per_push in (None, condition.rollouts_per_push)
        )

    def of(self, preset: str) -> list[tuple[Condition, Remedy]]:
        """Returns the results of a preset, with the condition of each."""
        return [(c, remedy) for c in self.conditions if (remedy := c.of(preset)) is not None]

    def measured(self, mismatch: Mismatch) -> Iterable[Condition]:
        """Returns the conditions of one kind of mismatch whose k3 is known."""
        return (c for c in self.conditions if c.mismatch == mismatch and c.k3)


@cache
def evidence() -> Evidence:
    """Returns the content of evidence.yaml."""
    return Evidence.model_validate(yaml.safe_load((files(__package__) / "evidence.yaml").read_text()))

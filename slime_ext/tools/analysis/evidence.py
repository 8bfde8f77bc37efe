"""What runs of ours measured, under which condition (evidence.yaml), and which of it speaks of a run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Literal

import yaml

from slime_ext.tools.analysis.document import FrozenModel
from slime_ext.tools.analysis.texts import counted

Mismatch = Literal["lag", "formats"]  # older weights in the sampler, or only other number formats


class Remedy(FrozenModel):
    """One way to train under a condition, compared with uncorrected runs of the same seeds.

    Attributes:
        arm: its letter in benchmarks/evidence/settings.yaml.
        preset: the correction's name, None if it is no preset.
        end: mean held-out score at the end, over its own seeds.
        effect, low, high: mean difference of the ends and its 95% interval; ``seeds`` is how many pairs.
        p: of the randomisation test of pairs, after Holm over the condition.
        planned: panel -> p of the test that was written down before it.
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
        """Its effect as text."""
        effect, low, high = (round(x, 2) + 0.0 for x in (self.effect, self.low, self.high))  # no -0.00
        return f"{effect:+.2f} ({low:.2f} to {high:.2f}, {counted(self.seeds, 'seed')})"

    @property
    def helped(self) -> bool:
        """Whether its runs ended significantly above the uncorrected ones."""
        return self.p < evidence().significance and self.effect > 0

    @property
    def did_harm(self) -> bool:
        """Whether its runs ended significantly below the uncorrected ones."""
        return self.p < evidence().significance and self.effect < 0


class Uncorrected(FrozenModel):
    """The runs that the others are compared with."""

    seeds: int
    end: float


class Condition(FrozenModel):
    """Runs that differ in how they train and in their seeds alone.

    Attributes:
        scored: the weights that answered the held-out questions, empty if they were the trainer's.
        k3: smallest and largest of the uncorrected runs, each its median over rollouts; empty if unknown.
        post_hoc: whether these comparisons were chosen when the runs were known.
    """

    name: str
    mismatch: Mismatch
    what: str
    scored: str
    panels: tuple[str, ...]
    steps_per_rollout: int
    k3: tuple[float, ...]
    post_hoc: bool
    uncorrected: Uncorrected
    remedies: tuple[Remedy, ...]

    @property
    def whose(self) -> str:
        """Whose weights answered, as the end of a sentence; empty if they were the trainer's."""
        return f"; scored with {self.scored.partition(',')[0]}" if self.scored else ""

    @property
    def range(self) -> str:
        """Its range of k3 as text."""
        return " to ".join(f"{bound:.2g}" for bound in self.k3)

    def of(self, preset: str) -> Remedy | None:
        """What a preset did under it; None if it was not run."""
        return next((remedy for remedy in self.remedies if remedy.preset == preset), None)


class Evidence(FrozenModel):
    """The whole file."""

    significance: float
    conditions: tuple[Condition, ...]

    def at(self, mismatch: Mismatch, k3: float | None, steps: int | None) -> Condition | None:
        """Returns the condition that a run is in, None if nothing was measured there.

        Args:
            k3: the run's median over rollouts, nats per token.
            steps: optimizer steps per rollout; None, unknown, fits any.
        """
        for condition in self.measured(mismatch):
            low, high = condition.k3
            if k3 is not None and low <= k3 <= high and steps in (None, condition.steps_per_rollout):
                return condition
        return None

    def of(self, preset: str) -> list[tuple[Condition, Remedy]]:
        """Returns what a preset did, condition by condition."""
        return [(c, remedy) for c in self.conditions if (remedy := c.of(preset)) is not None]

    def measured(self, mismatch: Mismatch) -> Iterable[Condition]:
        """Returns the conditions of one kind of mismatch whose k3 is known."""
        return (c for c in self.conditions if c.mismatch == mismatch and c.k3)


@cache
def evidence() -> Evidence:
    """Returns the file."""
    return Evidence.model_validate(yaml.safe_load((files(__package__) / "evidence.yaml").read_text()))

"""settings.yaml, read and checked: which runs there are, and how they are judged."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("settings.yaml")
AT = "@"  # between the arm of a cell and its variant


class Frozen(BaseModel):
    """No unknown keys, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(Frozen):
    """One way to train. `flags` name its correction as a host's do; `lr` multiplies the panel's."""

    what: str
    remedy: str = Field("", description="what it does about the mismatch; by default `what`")
    mismatch: bool = True
    lr: float = 1.0
    flags: dict[str, Any] = {}
    recommended: bool = Field(False, description="trains with what analyze recommends for B of this seed")


Scored = Literal["served", "trained", "trained less served"]


class Primary(Frozen):
    """The one comparison that a panel was made for: ends of ``arm`` less ends of ``against``, same seeds.

    Its test is Fisher's randomisation test of pairs, two-sided, and it alone needs no correction for several
    comparisons. The arms count as equal where the 90% interval of the mean difference lies within
    ``margin`` of 0 (two one-sided tests at 5%: Schuirmann 1987, J. Pharmacokinetics and Biopharmaceutics 15).

    Where several arms are named, or an arm has variants, a seed's end is that of the cell with the highest
    mean end over all other seeds: no seed chooses its own cell.
    """

    arm: str | tuple[str, ...]
    against: str | tuple[str, ...]
    margin: float
    scored: Scored = Field("served", description="whose answers: of the engine's weights, or the trainer's")

    def cells(self, cells: Iterable[str]) -> tuple[list[str], list[str]]:
        """Returns those of a panel's cells that are compared, and those that they are compared with."""
        found = list(cells)
        ones, others = (
            [cell for cell in found if base(cell) in ((names,) if isinstance(names, str) else names)]
            for names in (self.arm, self.against)
        )
        return ones, others


class Slope(Frozen):
    """How the gain of each arm grows with the distance of the policies, over a panel's variants.

    Slope of (end - end of ``against``) on log k3 of ``against``, run by run, with seeds as blocks.
    """

    arms: tuple[str, ...]
    against: str


class Variant(Frozen):
    """A level of a panel's factor, such as a learning rate or a lag: flags over the panel's."""

    flags: dict[str, Any] = {}
    arms: tuple[str, ...] = Field((), description="of the panel's, by default all")


def base(cell: str) -> str:
    """The arm of a cell.

    >>> base("B@lag2"), base("B")
    ('B', 'B')
    """
    return cell.partition(AT)[0]


def beside(cell: str, arm: str) -> str:
    """The cell of another arm with the same variant.

    >>> beside("C@lag2", "B"), beside("C", "B")
    ('B@lag2', 'B')
    """
    return arm + cell[len(base(cell)) :]


class Warm(Frozen):
    """Examples until the mean probability of a right answer was `until`: where a seed's arms started."""

    until: float
    lr: float = 1e-3


class Panel(Frozen):
    """One mismatch on one task. `mismatch` are the flags that arms with a mismatch have beside `flags`.

    With a `host` they are words of `slime-ext train` and of the host behind them, by attribute (runs.py says
    which are whose). Without one they were those of this project's own loop, which is gone: its lines stay.
    """

    what: str
    host: str | None = None
    analysed: int = Field(20, description="rollouts of B from which analyze recommends what G trains with")
    frozen: datetime.date | None = Field(None, description="test seeds run from then on, not before")
    chain: int | None = Field(None, description="the task was running sums of this length")
    warm: Warm | None = None
    flags: dict[str, Any]
    mismatch: dict[str, Any]
    test: Literal["failed seeds", "ends of a seed"] = "failed seeds"
    world: str = Field("stale", description="the mismatch of `python -m benchmarks.fidelity` that it is")
    arms: tuple[str, ...]
    variants: dict[str, Variant] = Field({}, description="levels of a factor; a cell is arm@variant")
    seeds: tuple[int, ...]
    primary: Primary | None = None
    slope: Slope | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """What a seed runs: the arms, or each arm with each of its variants."""
        if not self.variants:
            return self.arms
        return tuple(
            f"{arm}{AT}{name}"
            for name, variant in self.variants.items()
            for arm in self.arms
            if arm in (variant.arms or self.arms)
        )

    def asked(self, names: Iterable[str]) -> list[str]:
        """Returns the cells that arms or cells name; an arm that the panel lacks is a cell of its own."""
        return [cell for name in names for cell in self._named(name)]

    def _named(self, name: str) -> list[str]:
        return [cell for cell in self.cells if name in (cell, base(cell))] or [name]


class Condition(Frozen):
    """Panels whose runs differ in arms and seeds alone: the same task, flags and mismatch."""

    mismatch: Literal["lag", "formats"] = Field(description="older weights, or other number formats")
    what: str
    exact: str = Field(description="what arm A does in place of the mismatch")
    scored: str = Field(
        "", description="the weights that answer the held-out questions, if not the trainer's"
    )
    panels: tuple[str, ...]


class Judged(Frozen):
    """What counts as what; shares of 1 are of held-out exact match."""

    below_own_peak: float
    for_steps: int
    peak_at_least: float
    below_end_of_exact: float
    worse_than_exact_by: float
    rescued_within: float
    of_seeds: float
    significance: float
    resamples: int


class Settings(Frozen):
    """The whole file."""

    judged: Judged
    arms: dict[str, Arm]
    panels: dict[str, Panel]
    conditions: dict[str, Condition] = {}

    @model_validator(mode="after")
    def _differ_in_arms_and_seeds_alone(self) -> Settings:
        for name, condition in self.conditions.items():
            first, *others = (self.panels[panel] for panel in condition.panels)
            same = [(p.host, p.flags, p.mismatch, p.chain, p.warm) for p in (first, *others)]
            if any(one != same[0] for one in same):
                raise ValueError(f"conditions: {name}: expected panels that differ in arms and seeds alone")
        return self

    def arm(self, cell: str) -> Arm:
        """The arm of a cell, named with its variant."""
        of, variant = self.arms[base(cell)], cell.partition(AT)[2]
        return of.model_copy(update={"what": f"{of.what}, {variant}"}) if variant else of

    def flags(self, panel: str, arm: str, seed: int, recommended: str | None = None) -> dict[str, Any]:
        """The flags of one run, by attribute; ``arm`` may be a cell."""
        of, chosen = self.panels[panel], self.arms[base(arm)]
        varied = of.variants[arm.partition(AT)[2]].flags if AT in arm else {}
        found = of.flags | (of.mismatch if chosen.mismatch else {}) | varied | chosen.flags
        found |= {"lr": found["lr"] * chosen.lr, "seed": seed, "rollout_seed": seed}
        if recommended not in (None, "metrics_only"):
            found |= {"use_tis": True, "custom_tis_function_path": f"slime_ext.tis.{recommended}"}
        return found

    def with_tried(self, panel: str, tried: Mapping[str, Any]) -> Settings:
        """The settings with other values for flags of a panel; with any it is no longer frozen."""
        if not tried:
            return self
        of = self.panels[panel]
        mismatch = of.mismatch | {name: value for name, value in tried.items() if name in of.mismatch}
        flags = of.flags | {name: value for name, value in tried.items() if name not in of.mismatch}
        variants = {
            name: variant.model_copy(
                update={"flags": variant.flags | {n: v for n, v in tried.items() if n in variant.flags}}
            )
            for name, variant in of.variants.items()
        }
        changed = {"flags": flags, "mismatch": mismatch, "variants": variants, "frozen": None}
        other = of.model_copy(update=changed)
        return self.model_copy(update={"panels": self.panels | {panel: other}})

    def digest(self, panel: str, arm: str, recommended: str | None = None) -> str:
        """Names the settings of a cell: rows of other settings are not compared with it."""
        of = self.panels[panel]
        start = [] if of.warm is None else [of.chain, of.warm.model_dump()]
        flags = self.flags(panel, arm, 0, recommended)
        files = [(ROOT / flags["correction"]).read_text()] if "correction" in flags else []
        text = json.dumps([flags, *start, *files], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read(path: Path = FILE) -> Settings:
    """The settings of a file."""
    return Settings.model_validate(yaml.safe_load(path.read_text()))

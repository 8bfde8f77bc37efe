"""Reads and checks settings.yaml, which says which runs there are and how they are judged."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("settings.yaml")
AT = "@"  # separates the arm of a cell from its variant


class Frozen(BaseModel):
    """The base of all settings: refuses unknown keys, and cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(Frozen):
    """One way to train. `flags` name its correction as a host's do; `lr` multiplies the panel's."""

    what: str
    remedy: str = Field("", description="what the arm does about the mismatch; by default `what`")
    mismatch: bool = True
    lr: float = 1.0
    flags: dict[str, Any] = {}
    recommended: bool = Field(False, description="trains with analyze's recommendation for B")


Scored = Literal["served", "trained", "trained less served"]


class Primary(Frozen):
    """The comparison that a panel was made for: end of ``arm`` - end of ``against``.

    The test is Fisher's two-sided randomisation test of pairs. It is planned as the only test, so it needs no
    correction for several comparisons. The arms count as equal if the 90% interval of the mean difference is
    within ``margin`` of 0 (two one-sided tests at 5%: Schuirmann 1987, J. Pharmacokinetics and
    Biopharmaceutics 15).

    If several arms are named, or an arm has variants, a seed's end is that of the cell with the highest mean
    end over all other seeds, so no seed chooses its own cell.
    """

    arm: str | tuple[str, ...]
    against: str | tuple[str, ...]
    margin: float
    scored: Scored = Field("served", description="weights of the engine, of the trainer, or the gap")

    def cells(self, cells: Iterable[str]) -> tuple[list[str], list[str]]:
        """Returns the cells of both sides of the comparison."""
        compared = list(cells)
        ones, others = (
            [cell for cell in compared if base(cell) in ((names,) if isinstance(names, str) else names)]
            for names in (self.arm, self.against)
        )
        return ones, others


class Slope(Frozen):
    """The growth of an arm's gain with the policies' distance, over a panel's variants.

    It is the slope of (end - end of ``against``) on log k3 of ``against``, run by run, with seeds as blocks.
    It is planned as the panel's only test.
    """

    arm: str
    against: str


class Variant(Frozen):
    """A level of a panel's factor, such as a learning rate or a lag. Its flags override the panel's."""

    flags: dict[str, Any] = {}


def base(cell: str) -> str:
    """Returns the arm of a cell.

    >>> base("B@lag2"), base("B")
    ('B', 'B')
    """
    return cell.partition(AT)[0]


def beside(cell: str, arm: str) -> str:
    """Returns the cell of another arm with the same variant.

    >>> beside("C@lag2", "B"), beside("C", "B")
    ('B@lag2', 'B')
    """
    return arm + cell[len(base(cell)) :]


class Warm(Frozen):
    """The start of a seed's arms.

    Examples are trained until the mean probability of a right answer is `until`.
    """

    until: float
    lr: float = 1e-3


class Panel(Frozen):
    """One mismatch on one task. Arms with a mismatch have the flags `mismatch` besides `flags`.

    With a `host`, these are flags of `slime-ext train` and of the host, by attribute. Without a host, they
    are flags of a former training loop of this project. Its lines remain.
    """

    what: str
    host: str | None = None
    analysed: int = Field(20, description="rollouts of B from which analyze recommends the correction of G")
    frozen: datetime.date | None = Field(None, description="the first day on which test seeds may run")
    chain: int | None = Field(None, description="length of the task's running sums")
    warm: Warm | None = None
    flags: dict[str, Any]
    mismatch: dict[str, Any]
    test: Literal["failed seeds", "ends of a seed"] = "failed seeds"
    world: str = Field("stale", description="the same mismatch in `python -m benchmarks.fidelity`")
    arms: tuple[str, ...]
    variants: dict[str, Variant] = Field({}, description="levels of a factor; a cell is arm@variant")
    seeds: tuple[int, ...]
    primary: Primary | None = None
    slope: Slope | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """Returns what a seed runs: the arms, or each arm with each of its variants."""
        if not self.variants:
            return self.arms
        return tuple(f"{arm}{AT}{name}" for name in self.variants for arm in self.arms)


class Cell(Frozen):
    """The runs of one arm, or of one arm and variant, of a panel."""

    panel: str
    cell: str


class Condition(Frozen):
    """Panels with the same task, flags and mismatch. Their runs differ only in arms and seeds.

    ``panel@variant`` in ``panels`` is one variant of a panel.
    """

    mismatch: Literal["lag", "formats"] = Field(description="older weights, or other number formats")
    what: str
    exact: str = Field(description="what arm A has instead of the mismatch")
    exact_runs: Cell | None = Field(None, description="the runs that are those of arm A, if A did not run")
    scored: str = Field(
        "", description="the weights that answer the held-out questions, if not the trainer's"
    )
    whose: Literal["served", "trained"] = Field(
        "served", description="which score of a run counts: with the engine's weights or the trainer's"
    )
    panels: tuple[str, ...]
    shared: tuple[str, ...] = Field((), description="arms whose runs another panel made, on its first seeds")


class Judged(Frozen):
    """The thresholds of the verdicts. Shares are of held-out exact match, between 0 and 1."""

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
    """The content of settings.yaml."""

    judged: Judged
    arms: dict[str, Arm]
    panels: dict[str, Panel]
    conditions: dict[str, Condition] = {}

    @model_validator(mode="after")
    def _differ_in_arms_and_seeds_alone(self) -> Settings:
        for name, condition in self.conditions.items():
            first, *others = (self.panel(panel) for panel in condition.panels)
            same = [(p.host, p.flags, p.mismatch, p.chain, p.warm) for p in (first, *others)]
            if any(one != same[0] for one in same):
                raise ValueError(f"conditions: {name}: expected panels that differ in arms and seeds alone")
        return self

    def panel(self, name: str) -> Panel:
        """Returns a panel, or what ``panel@variant`` names: the panel with the flags of one variant."""
        of, variant = self.panels[base(name)], name.partition(AT)[2]
        return of.model_copy(update={"flags": of.flags | of.variants[variant].flags}) if variant else of

    def is_language_model(self, condition: str) -> bool:
        """Whether the runs of a condition trained a language model, on a real host."""
        return bool(self.panel(self.conditions[condition].panels[0]).host)

    def arm(self, cell: str) -> Arm:
        """Returns the arm of a cell, with the variant in its name."""
        of, variant = self.arms[base(cell)], cell.partition(AT)[2]
        return of.model_copy(update={"what": f"{of.what}, {variant}"}) if variant else of

    def flags(self, panel: str, arm: str, seed: int, recommended: str | None = None) -> dict[str, Any]:
        """Returns the flags of one run by attribute. ``arm`` may be a cell."""
        of, chosen = self.panels[panel], self.arms[base(arm)]
        varied = of.variants[arm.partition(AT)[2]].flags if AT in arm else {}
        flags_of_run = of.flags | (of.mismatch if chosen.mismatch else {}) | varied | chosen.flags
        flags_of_run |= {"lr": flags_of_run["lr"] * chosen.lr, "seed": seed, "rollout_seed": seed}
        if recommended not in (None, "metrics_only"):
            flags_of_run |= {"use_tis": True, "custom_tis_function_path": f"slime_ext.tis.{recommended}"}
        return flags_of_run

    def digest(self, panel: str, arm: str, recommended: str | None = None) -> str:
        """Returns a digest of a cell's settings. Rows with different digests are not compared."""
        of = self.panels[panel]
        start = [] if of.warm is None else [of.chain, of.warm.model_dump()]
        flags = self.flags(panel, arm, 0, recommended)
        files = [(ROOT / flags["correction"]).read_text()] if "correction" in flags else []
        text = json.dumps([flags, *start, *files], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read(path: Path = FILE) -> Settings:
    """Reads the settings of a file."""
    return Settings.model_validate(yaml.safe_load(path.read_text()))

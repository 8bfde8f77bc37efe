"""settings.yaml, read and checked: which runs there are, and how they are judged."""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("settings.yaml")
PATHS = ("hf_checkpoint", "prompt_data")


class Frozen(BaseModel):
    """No unknown keys, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(Frozen):
    """One way to train. `flags` are the launcher's; `lr` multiplies the panel's learning rate."""

    what: str
    mismatch: bool = True
    lr: float = 1.0
    flags: dict[str, Any] = {}
    recommended: bool = Field(False, description="trains with what analyze recommends for B of this seed")


class Warm(Frozen):
    """Examples until the mean probability of a right answer is `until`; where a seed's arms start."""

    until: float
    lr: float = 1e-3


class Panel(Frozen):
    """One mismatch on one task. `mismatch` are the flags that arms with a mismatch have beside `flags`."""

    what: str
    frozen: datetime.date | None = Field(None, description="test seeds run from then on, not before")
    chain: int | None = Field(None, description="the task is running sums of this length (chain.py)")
    warm: Warm | None = None
    flags: dict[str, Any]
    mismatch: dict[str, Any]
    world: str = Field("stale", description="the mismatch of `slime-ext bench fidelity` that it is")
    arms: tuple[str, ...]
    seeds: tuple[int, ...]


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
    analysed_rollouts: int
    arms: dict[str, Arm]
    panels: dict[str, Panel]

    def flags(self, panel: str, arm: str, seed: int, recommended: str | None = None) -> dict[str, Any]:
        """The launcher's flags of one run, by attribute; paths from the root of the repository."""
        of, chosen = self.panels[panel], self.arms[arm]
        found = of.flags | (of.mismatch if chosen.mismatch else {}) | chosen.flags
        found |= {"lr": found["lr"] * chosen.lr, "seed": seed, "rollout_seed": seed}
        if recommended not in (None, "metrics_only"):
            found |= {"use_tis": True, "custom_tis_function_path": f"slime_ext.tis.{recommended}"}
        return found

    def digest(self, panel: str, arm: str) -> str:
        """Names the settings of a cell: rows of other settings are not compared with it."""
        of = self.panels[panel]
        start = [] if of.warm is None else [of.chain, of.warm.model_dump()]
        text = json.dumps([self.flags(panel, arm, 0), *start], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def read(path: Path = FILE) -> Settings:
    """The settings of a file."""
    return Settings.model_validate(yaml.safe_load(path.read_text()))


def located(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags with paths that hold wherever the run is started."""
    found = flags | {key: str(ROOT / flags[key]) for key in PATHS if key in flags}
    if "eval_prompt_data" in flags:
        name, path = flags["eval_prompt_data"]
        found["eval_prompt_data"] = [name, str(ROOT / path)]
    return found

"""The committed lines: one JSON object for each run that ended; pilots and repeats in files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.evidence.settings import Scored

FILE = Path(__file__).with_name("rows.jsonl")
PILOTS = FILE.with_name("pilots.jsonl")
AGAIN = FILE.with_name("again.jsonl")


class Row(BaseModel):
    """One run.

    Attributes:
        settings: digest of the run's settings; a line of other settings is not compared.
        tried: the settings that a pilot had in place of its panel's.
        commit: of the code that ran, with a plus where files were changed.
        heldout: (optimizer step, held-out exact match); on a host of the engine's weights, after a push.
        heldout_trained: the same of the trainer's weights, where both were scored.
        end: the last of ``heldout``; 0 for a run that diverged.
        k3, ess: medians over the rollouts; None in lines without a host.
        stopped: what the run said where it diverged.
        recommended: what analyze recommended after the first rollouts (arm B), or what was trained (arm G).
        effects: what each correction would have done to those rollouts, by name (arm B, lines since
            2026-11-26): share of tokens kept, effective sample size of the weights.
        rollouts: what each rollout logged, in their order (lines since 2026-11-26 18:00 UTC); ``runs.LOGGED``
            has the names. ``heldout`` is there where an evaluation followed.
        seconds: wall time on whatever else the machine did; no result.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    panel: str
    arm: str
    seed: int
    settings: str
    commit: str
    versions: dict[str, str]
    heldout: list[tuple[int, float]]
    heldout_trained: list[tuple[int, float]] | None = None
    end: float
    k3: float | None = None
    ess: float | None = None
    stopped: str | None = None
    recommended: str | None = None
    effects: dict[str, tuple[float, float]] | None = None
    rollouts: list[dict[str, float]] | None = None
    seconds: float
    tried: dict[str, Any] | None = None

    def scored(self, whose: Scored) -> float | None:
        """The last held-out score of the engine's weights, of the trainer's, or how far these are above.

        None where the trainer's were not scored.
        """
        if whose == "served":
            return self.end
        if not self.heldout_trained:
            return None
        trained = 0.0 if self.stopped else self.heldout_trained[-1][1]
        return trained if whose == "trained" else trained - self.end

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Which run it is."""
        return self.panel, self.arm, self.seed, self.settings


def read(path: Path = FILE) -> list[Row]:
    """All lines; none where there is no file yet."""
    return [Row.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(row: Row, path: Path = FILE) -> None:
    """Adds a line."""
    with path.open("a") as file:
        file.write(row.model_dump_json() + "\n")

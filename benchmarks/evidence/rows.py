"""Reads the committed lines, one JSON object per finished run.

Pilots and repeated runs have separate files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from benchmarks.evidence.settings import Scored

FILE = Path(__file__).with_name("rows.jsonl")
PILOTS = FILE.with_name("pilots.jsonl")
AGAIN = FILE.with_name("again.jsonl")


class Row(BaseModel):
    """The line of one run.

    Attributes:
        settings: digest of the run's settings; lines with other settings are not compared.
        tried: the settings that a pilot had instead of its panel's.
        commit: commit of the code that ran, with a plus if files were changed.
        heldout: (optimizer step, held-out exact match); on a host with the engine's weights, after a push.
        heldout_trained: the same with the trainer's weights, if both were scored.
        end: the last score of ``heldout``; 0 for a run that diverged.
        k3, ess: medians over the rollouts; None in lines without a host.
        stopped: the message of a run that diverged.
        recommended: what analyze recommended after the first rollouts (arm B), or what was trained (arm G).
        effects: correction -> (share of tokens kept, effective sample size of the weights) that it would have
            had on those rollouts (arm B, lines since 2026-11-26).
        rollouts: what each rollout logged, in their order (lines since 2026-11-26 18:00 UTC). A rollout has
            ``heldout`` if an evaluation followed it.
        seconds: wall time. It is no result, because the machine also did other work.
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
        """Returns the last held-out score of the engine's or trainer's weights, or trainer - engine.

        Returns None if it needs a score of the trainer's weights and there is none.
        """
        if whose == "served":
            return self.end
        if not self.heldout_trained:
            return None
        trained = 0.0 if self.stopped else self.heldout_trained[-1][1]
        return trained if whose == "trained" else trained - self.end

    def as_scored(self, whose: Scored) -> Row:
        """Returns the run with the scores of the engine's or the trainer's weights alone.

        Raises:
            ValueError: it has no score of the trainer's weights.
        """
        if whose == "served":
            return self
        if (end := self.scored(whose)) is None:
            raise ValueError(f"{self.panel}, {self.arm}, seed {self.seed}: no score of the trainer's weights")
        return self.model_copy(update={"heldout": self.heldout_trained, "end": end})

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Returns what identifies the run."""
        return self.panel, self.arm, self.seed, self.settings


def read(path: Path = FILE) -> list[Row]:
    """Returns all lines; an empty list if the file does not exist."""
    return [Row.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []

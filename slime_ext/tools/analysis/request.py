"""Defines what to analyse. Imports no torch, so that mistakes are reported before that slow import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_ext.tools.analysis.readers.find import DumpFiles, RolloutRanges, find

if TYPE_CHECKING:
    from slime_ext.tools.analysis.measures.user_corrections import UserCorrection

# The preset of the decision table, and one of each other kind. More presets would take longer.
SHORTLIST = (
    "metrics_only",
    "token_tis",
    "importance_sampling",
    "seq_is",
    "fireworks_token",
    "icepop",
    "kpop",
    "cispo",
    "geo_rs",
    "skyrl_geo_mask",
    "decoupled_geo_rs_token_tis",
)


@dataclass(frozen=True)
class Request:
    """What to analyse, and how.

    Args:
        paths: folders, files or patterns.
        rollouts: ranges such as ``100-200``; None for all.
        jobs: number of processes.
        configs: name -> correction of a user's file, evaluated beside the presets.
        presets: names of the presets that are evaluated.
        rate: rejection rate for which thresholds are suggested; None: no suggestions.
        tokenizer: folder of the tokenizer, or None.
        exact: whether to report where the two log-probs of a token differ.
    """

    paths: tuple[str, ...]
    rollouts: str | None = None
    jobs: int = 1
    configs: Mapping[str, UserCorrection] = field(default_factory=dict)
    presets: tuple[str, ...] = SHORTLIST
    rate: float | None = None
    tokenizer: str | None = None
    exact: bool = False

    def files(self) -> DumpFiles:
        """Returns the files to read.

        Raises:
            DataError: a path holds no dump.
        """
        return find(self.paths, RolloutRanges.parse(self.rollouts))

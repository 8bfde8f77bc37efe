"""What to analyse. It needs no torch, so that a mistake in it is found before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_ext.tools.analysis.readers.find import DumpFiles, RolloutRanges, find

if TYPE_CHECKING:
    from slime_ext.tools.analysis.measures.user_corrections import UserCorrection

# What a recommendation may name, and one of each other kind; every further preset takes its time.
SHORTLIST = (
    "metrics_only",
    "token_tis",
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
        paths: folders, files, patterns.
        rollouts: ranges such as ``100-200``; None for all.
        jobs: processes.
        configs: name -> the user's own, beside the presets.
        presets: names of those that are applied to the run.
        rate: wished rejection rate of the suggestions, or None for none.
        tokenizer: folder of the tokenizer, or None.
        exact: whether it is asked where the two log-probs of a token differ.
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
        """The files to read.

        Raises:
            DataError: a path holds none.
        """
        return find(self.paths, RolloutRanges.parse(self.rollouts))

"""Reads the flags of a run from args.json in its folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_ext.tools.analysis.readers.vocabulary import FLAGS, folders_of, read_json

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def flags_of(paths: Sequence[str]) -> dict[str, Any]:
    """Returns the content of the first args.json in the folders of a run; empty without one.

    ``has_experts`` is added, if args.json or the config.json of its model tells the number of experts.
    """
    for file in files_of_flags(paths):
        flags = dict(read_json(file))
        if flags:
            model = flags.get("hf_checkpoint")
            config = read_json(Path(model) / "config.json") if isinstance(model, str) else {}
            known = [source[key] for source in (flags, config) for key in EXPERTS if key in source]
            counts = [count for count in known if isinstance(count, int)]
            return flags | ({"has_experts": max(counts) > 1} if counts else {})
    return {}


def files_of_flags(paths: Sequence[str]) -> list[Path]:
    """Returns where the flags of a run may be: in the folder of each path, or above it."""
    return [folder / FLAGS for folder in folders_of(paths)]


def count_of(flags: Mapping[str, Any], name: str) -> int | None:
    """Returns the count that a flag names; None if it names no count.

    >>> steps = "num_steps_per_rollout"
    >>> count_of({steps: 4}, steps), count_of({steps: None}, steps), count_of({}, steps)
    (4, None, None)
    """
    count = flags.get(name)
    return count if type(count) is int and count >= 1 else None

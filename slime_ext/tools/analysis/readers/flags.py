"""The flags of a run, as far as its folders tell them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_ext.tools.analysis.readers.vocabulary import read_json

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def flags_of(paths: Sequence[str]) -> dict[str, Any]:
    """args.json of the first folder that holds one, and ``has_experts`` if it, or the config.json of the
    model that it names, tells; empty where there is none."""
    for folder in (folder for path in paths for folder in (Path(path), Path(path).parent)):
        flags = dict(read_json(folder / "args.json"))
        if flags:
            model = flags.get("hf_checkpoint")
            config = read_json(Path(model) / "config.json") if isinstance(model, str) else {}
            known = [found[key] for found in (flags, config) for key in EXPERTS if key in found]
            counts = [count for count in known if isinstance(count, int)]
            return flags | ({"has_experts": max(counts) > 1} if counts else {})
    return {}

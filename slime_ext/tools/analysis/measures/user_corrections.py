"""Loads the files of ``--config`` as corrections, which are evaluated beside the presets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_ext import presets
from slime_ext.config import load as config
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Bounds
from slime_ext.errors import ConfigError
from slime_ext.hosts.flags import check_kinds
from slime_ext.tools.analysis.texts import encodable
from slime_ext.tools.folders import find_own_steps


@dataclass(frozen=True)
class UserCorrection:
    """A file of ``--config``: its correction, and the clip range that it sets for the host."""

    file: str
    correction: Correction
    bounds: Bounds


def load_user_corrections(files: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, UserCorrection]:
    """Returns the corrections by the name of their row.

    The name is the stem of the file, followed by its path if a preset has the same name.

    Args:
        files: path and content of each file; the content is not changed.

    Raises:
        ConfigError: a file has no valid correction, or two files have the same name.
    """
    corrections: dict[str, UserCorrection] = {}
    for file, mapping in files:
        stem = Path(file).stem
        name = encodable(f"{stem} ({file})" if stem in presets.PRESETS else stem)
        if name in corrections:
            raise ConfigError(f"--config {file}: expected each name once, got '{name}' twice: rename one")
        corrections[name] = _loaded(file, mapping)
    return corrections


def _loaded(file: str, mapping: Mapping[str, Any]) -> UserCorrection:
    if "slime_ext" not in mapping:
        keys = ", ".join(map(str, mapping)) or "nothing"
        raise ConfigError(f"{file}: expected the key slime_ext, got {keys}")
    find_own_steps(mapping["slime_ext"])
    clip = {key: mapping[key] for key in ("eps_clip", "eps_clip_high") if mapping.get(key) is not None}
    try:
        check_kinds(SimpleNamespace(**clip))
        correction = config.read_config(mapping["slime_ext"]).correction
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    # slime sets --eps-clip-high from --eps-clip before it reads the file
    bounds = Bounds()
    bounds = Bounds(clip.get("eps_clip", bounds.low), clip.get("eps_clip_high", bounds.high))
    return UserCorrection(file, correction, bounds)

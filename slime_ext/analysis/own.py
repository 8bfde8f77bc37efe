"""The user's own corrections, beside the presets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_ext import config, presets
from slime_ext.correction import Correction
from slime_ext.errors import ConfigError
from slime_ext.host.flags import check_flags
from slime_ext.losses import Bounds


@dataclass(frozen=True)
class Own:
    """A file of --custom-config-path: its correction, and the host's clip range that it sets."""

    file: str
    correction: Correction
    bounds: Bounds


def resolved(files: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Own]:
    """``--config`` files by the name of their row: the file's, with its path behind it if that is a preset's.

    Args:
        files: path and content of each, which stays as it is.

    Raises:
        ConfigError: one does not resolve.
    """
    found: dict[str, Own] = {}
    for file, mapping in files:
        stem = Path(file).stem
        name = f"{stem} ({file})" if stem in presets.PRESETS else stem
        if name in found:
            raise ConfigError(
                f"--config {file}: expected each name once, got '{name}' twice: it names the row of the table"
            )
        found[name] = _own(file, mapping)
    return found


def _own(file: str, mapping: Mapping[str, Any]) -> Own:
    if "slime_ext" not in mapping:
        raise ConfigError(
            f"{file}: expected the key slime_ext, got {', '.join(map(str, mapping)) or 'nothing'}"
        )
    clip = {key: mapping[key] for key in ("eps_clip", "eps_clip_high") if mapping.get(key) is not None}
    try:
        check_flags(SimpleNamespace(**clip), ())
        correction = config.read_config(mapping["slime_ext"]).correction
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    # slime sets --eps-clip-high from its own --eps-clip before it reads the file
    bounds = Bounds()
    low, high = clip.get("eps_clip", bounds.low), clip.get("eps_clip_high", bounds.high)
    return Own(file, correction, Bounds(low, high))

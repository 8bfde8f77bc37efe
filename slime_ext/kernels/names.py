"""The backends by name: what a configuration may say, without importing any of them."""

from __future__ import annotations

from slime_ext.errors import ConfigError, did_you_mean

BACKENDS = ("auto", "eager", "compiled", "triton")


def check_name(name: object, where: str = "slime_ext.backend") -> None:
    """Raises ConfigError unless ``name`` is a backend's."""
    if name not in BACKENDS:
        near = did_you_mean(str(name), BACKENDS)
        raise ConfigError(f"{where}: expected one of {', '.join(BACKENDS)}, got '{name}'{near}")

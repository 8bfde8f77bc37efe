"""Patches as data: what ``patches/*.yaml`` may say, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.mappings import of_package

PARAMETER = "parameter"
EDIT_KEYS = ("name", "also_known_as", "places", "anchor", "needs", "line")


@dataclass(frozen=True)
class Place:
    """A function in a file of the host; ``file`` is relative to the checkout, with forward slashes."""

    file: str
    function: str


@dataclass(frozen=True)
class Anchor:
    """The one piece of syntax in a function that a line is inserted into.

    ``dict``: the dict literal that has all keys of ``having``; ``strings``: the list, tuple or set literal
    that has all those strings; ``return``: ``return <before>``. The line goes in front of the entry, string
    or statement ``before``.
    """

    kind: str
    having: tuple[str, ...]
    before: str

    def __str__(self) -> str:
        if self.kind == "return":
            return f"return {self.before}"
        noun = "dict" if self.kind == "dict" else "list of strings"
        return f"{noun} with {', '.join(self.having)}"


@dataclass(frozen=True)
class Edit:
    """One line at one anchor, in the one of ``places`` that this host has. ``needs`` are the names that the
    line reads, each with the function whose result it must be bound to, or ``parameter``."""

    name: str
    places: tuple[Place, ...]
    anchor: Anchor
    line: str
    also_known_as: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also_known_as)


@dataclass(frozen=True)
class Patch:
    """Edits that are made together or not at all. ``keywords`` are what a hook is called with in addition."""

    id: str
    title: str
    tested: str
    keywords: tuple[str, ...]
    edits: tuple[Edit, ...]

    @property
    def marker(self) -> str:
        """Ends every line that this patch inserts; revert removes exactly these lines."""
        return f"  # slime-ext patch {self.id}"

    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.file for edit in self.edits for place in edit.places))


def load_patches(folder: Path | None = None) -> tuple[Patch, ...]:
    """Every patch of a folder, by number.

    Raises:
        ConfigError: there is none, or a file does not say what a patch must say.
    """
    folder = folder or of_package("patches")
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise ConfigError(f"{folder}: expected patches (*.yaml), got none: reinstall slime-ext")
    return tuple(_patch(path) for path in paths)


def select(patches: tuple[Patch, ...], ids: list[str]) -> tuple[Patch, ...]:
    """The patches that the command line names; all where it names none."""
    known = [patch.id for patch in patches]
    for name in ids:
        if name not in known:
            hint = did_you_mean(name, known) or f": one of {', '.join(known)}"
            raise ConfigError(f"slime-ext patch: expected the number of a patch, got '{name}'{hint}")
    return tuple(patch for patch in patches if not ids or patch.id in ids)


def _patch(path: Path) -> Patch:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Patch(
            id=raw["id"],
            title=raw["title"],
            tested=raw["tested"],
            keywords=tuple(raw["keywords"]),
            edits=tuple(_edit(entry) for entry in raw["edits"]),
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path}: expected a patch (docs/patches.md), got {reason}: reinstall slime-ext"
        ) from error


def _edit(raw: Mapping[str, Any]) -> Edit:
    if unknown := set(raw) - set(EDIT_KEYS):
        raise ValueError(f"unknown keys {sorted(unknown)}")
    return Edit(
        name=raw["name"],
        places=tuple(Place(**place) for place in raw["places"]),
        anchor=_anchor(dict(raw["anchor"])),
        line=raw["line"],
        also_known_as=tuple(raw.get("also_known_as", ())),
        needs=tuple(raw.get("needs", {}).items()),
    )


def _anchor(raw: dict[str, Any]) -> Anchor:
    if set(raw) == {"return"}:
        return Anchor("return", (), raw["return"])
    kind = next((kind for kind in ("dict", "strings") if set(raw) == {kind, "before"}), None)
    if kind is None or raw["before"] is None:
        raise ValueError(f"anchor {raw}")
    return Anchor(kind, tuple(raw[kind]), raw["before"])

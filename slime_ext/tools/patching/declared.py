"""Patches as data: what ``patches/*.yaml`` may say, read and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from slime_ext.config.files import of_package, read_yaml
from slime_ext.errors import ConfigError, cut, did_you_mean

PARAMETER = "parameter"


class Declared(BaseModel):
    """A part of a patch's file: every key known, every value of its type."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Place(Declared):
    """A function in a file of the host; ``file`` is relative to the checkout, with forward slashes."""

    file: str
    function: str


class Anchor(Declared):
    """The one piece of syntax in a function that a line is inserted into.

    ``dict``: the dict literal that has all keys of ``having``; ``strings``: the list, tuple or set literal
    that has all those strings; ``return``: ``return <before>``. The line goes in front of the entry, string
    or statement ``before``.
    """

    kind: Literal["dict", "strings", "return"]
    having: tuple[str, ...]
    before: str

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """``{dict: [...], before: ...}`` and its like, as the file has it."""
        kind = next((kind for kind in ("dict", "strings", "return") if kind in raw), None)
        if kind == "return":
            return {"kind": kind, "having": (), "before": raw[kind]}
        return {"kind": kind, "having": raw.get(kind), **{k: v for k, v in raw.items() if k != kind}}

    def __str__(self) -> str:
        if self.kind == "return":
            return f"return {self.before}"
        noun = "dict" if self.kind == "dict" else "list of strings"
        return f"{noun} with {', '.join(self.having)}"


class Edit(Declared):
    """One line at one anchor, in the one of ``places`` that this host has. ``needs`` are the names that the
    line reads, each with the function whose result it must be bound to, or ``parameter``."""

    name: str
    places: tuple[Place, ...]
    anchor: Anchor
    line: str
    also_known_as: tuple[str, ...] = ()
    needs: dict[str, str] = {}


class Patch(Declared):
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


def load_patches() -> tuple[Patch, ...]:
    """Every patch that comes with slime_ext, by number.

    Raises:
        ConfigError: there is none, or a file does not say what a patch must say.
    """
    folder = of_package("patches")
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
        return Patch.model_validate(read_yaml(str(path)))
    except ValueError as error:
        reason = cut(" ".join(str(error).split()))
        raise ConfigError(
            f"{path}: expected a patch (docs/patches.md), got {reason}: reinstall slime-ext"
        ) from error

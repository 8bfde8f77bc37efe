"""Patches on a tree: their state, and the edits that apply or revert them. Nothing here writes."""

from __future__ import annotations

from dataclasses import dataclass

from slime_ext.errors import DataError
from slime_ext.tools.patching.declared import Edit, Patch
from slime_ext.tools.patching.edit import ABSENT, OURS, Found, find, insert, remove
from slime_ext.tools.patching.tree import Tree, is_dirty

APPLIED, IN_HOST, PARTLY, NOT_APPLIED, UNKNOWN = (
    "applied",
    "in the host",
    "partly applied",
    "not applied",
    "unknown host",
)
CLEAN = (APPLIED, IN_HOST)


@dataclass(frozen=True)
class Status:
    """What one patch is in a tree; ``reason`` says why that is not known."""

    patch: Patch
    state: str
    edits: tuple[tuple[Edit, Found], ...] = ()
    reason: str = ""


def status(tree: Tree, patch: Patch) -> Status:
    """``applied`` (by us, wholly or where the host lacked it), ``in the host`` (its own), ``not applied``,
    ``partly applied`` (some by us, some missing) or ``unknown host``."""
    try:
        found = tuple((edit, find(patch, edit, tree.read)) for edit in patch.edits)
    except DataError as error:
        return Status(patch, UNKNOWN, reason=str(error))
    states = {where.state for _, where in found}
    return Status(patch, _overall(states), found)


def _overall(states: set[str]) -> str:
    if ABSENT in states:
        return PARTLY if OURS in states else NOT_APPLIED
    return APPLIED if OURS in states else IN_HOST


def apply(tree: Tree, patches: tuple[Patch, ...], *, allow_dirty: bool = False) -> None:
    """Inserts in the tree's memory what is missing of each patch.

    Raises:
        DataError: an anchor is not found exactly once, or a file has changes that are not committed.
    """
    for patch in patches:
        for edit in patch.edits:
            found = find(patch, edit, tree.read)
            if found.state == ABSENT:
                source = tree.read(found.file) or b""
                _check_clean(tree, found.file, source, allow_dirty)
                tree.edit(found.file, insert(source, found, patch, edit))
                _check_inserted(tree, patch, edit)


def revert(tree: Tree, patches: tuple[Patch, ...]) -> None:
    """Removes from the tree's memory every line that the patches inserted, last patch first; what the host
    has of its own stays."""
    for patch in reversed(patches):
        for file in reversed(patch.files()):
            source = tree.read(file)
            if source is not None and patch.marker.strip().encode() in source:
                tree.edit(file, remove(source, file, patch))


def _check_inserted(tree: Tree, patch: Patch, edit: Edit) -> None:
    if (state := find(patch, edit, tree.read).state) != OURS:
        raise DataError(
            f"patch {patch.id}: expected {edit.name} at its anchor, got it {state}: report this host"
        )


def _check_clean(tree: Tree, file: str, source: bytes, allow_dirty: bool) -> None:
    if allow_dirty or file in tree.after:
        return
    without = b"".join(line for line in source.splitlines(keepends=True) if b"# slime-ext patch " not in line)
    texts = (source, without)  # our lines may be committed, or not
    if all(is_dirty(tree.root, file, text) for text in texts):
        raise DataError(
            f"{file}: expected a file as committed, got uncommitted changes: commit, or use --allow-dirty"
        )

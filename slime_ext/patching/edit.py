"""One edit on the bytes of one file: found by syntax, inserted as a line of its own, removed as that line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime_ext.errors import DataError
from slime_ext.patching.declared import PARAMETER, Edit, Patch, Place
from slime_ext.patching.syntax import Function, Literal, functions

OURS, HOST, ABSENT = "ours", "host", "absent"
Read = Callable[[str], bytes | None]


@dataclass(frozen=True)
class Found:
    """Where an edit belongs in this host, and whether it is there: by our line, by the host's own, or not
    yet."""

    file: str
    offset: int
    state: str


def find(patch: Patch, edit: Edit, read: Read) -> Found:
    """The one place of this host.

    Args:
        read: file relative to the checkout -> its bytes, or None where there is no such file.

    Raises:
        DataError: no place matches, or more than one.
    """
    hits = [hit for place in edit.places for hit in _matches(edit, place, read)]
    if len(hits) != 1:
        raise unknown(patch, edit, read, f"found {len(hits)} times, expected 1")
    place, function, literal = hits[0]
    source = read(place.file) or b""
    if (there := _present(edit, function, literal)) is not None:
        ours = _line_at(source, there)[1].rstrip().endswith(patch.marker.encode())
        return Found(place.file, there, OURS if ours else HOST)
    offset = literal.entries[edit.anchor.before]
    if why := _unfit(edit, function, source, offset):
        raise unknown(patch, edit, read, why)
    return Found(place.file, offset, ABSENT)


def _unfit(edit: Edit, function: Function, source: bytes, offset: int) -> str:
    """Why our line cannot stand there; empty if it can."""
    for name, callee in edit.needs.items():
        if callee == PARAMETER and name not in function.parameters:
            return f"found where {name} is not a parameter"
        if callee != PARAMETER and (name, callee) not in function.bound:
            return f"found where {name} is not the result of {callee}"
    if not _starts_its_line(source, offset):
        return f"has '{edit.anchor.before}' not at the beginning of a line"
    return ""


def insert(source: bytes, found: Found, patch: Patch, edit: Edit) -> bytes:
    """The file with our line in front of the anchor, with its indent and its line end."""
    start, line = _line_at(source, found.offset)
    indent = source[start : found.offset]
    end = b"\r\n" if line.endswith(b"\r\n") or (not line.endswith(b"\n") and b"\r\n" in source) else b"\n"
    return source[:start] + indent + (edit.line + patch.marker).encode() + end + source[start:]


def remove(source: bytes, file: str, patch: Patch) -> bytes:
    """The file without the lines that this patch inserted.

    Raises:
        DataError: somebody has changed such a line since.
    """
    marker, texts = patch.marker.encode(), {(edit.line + patch.marker).encode() for edit in patch.edits}
    kept = []
    for number, line in enumerate(source.splitlines(keepends=True), 1):
        if line.strip() in texts:
            continue
        if line.rstrip().endswith(marker.strip()):
            raise DataError(
                f"{file}:{number}: expected the line that patch {patch.id} inserted, got '{_text(line)}': "
                "restore or delete it by hand"
            )
        kept.append(line)
    return b"".join(kept)


def unknown(patch: Patch, edit: Edit, read: Read, what: str) -> DataError:
    """The refusal: file, anchor, and what the patch is tested with."""
    place = next((p for p in edit.places if read(p.file) is not None), edit.places[0])
    return DataError(
        f"{place.file}: anchor {place.function} > {edit.anchor} {what}: patch {patch.id} ({edit.name}) is "
        f"tested with {patch.tested}; this host is another, nothing was written"
    )


def _matches(edit: Edit, place: Place, read: Read) -> list[tuple[Place, Function, Literal]]:
    source = read(place.file)
    if source is None or place.function.encode() not in source:
        return []
    known = functions(source, place.file).get(place.function, [])
    return [(place, function, literal) for function in known for literal in _anchors(edit, function)]


def _anchors(edit: Edit, function: Function) -> list[Literal]:
    anchor = edit.anchor
    if anchor.kind == "return":
        return [Literal("return", {name: at}, name) for name, at in function.returns if name == anchor.before]
    wanted = {*anchor.having, anchor.before}
    return [x for x in function.literals if x.kind == anchor.kind and wanted <= x.entries.keys()]


def _present(edit: Edit, function: Function, literal: Literal) -> int | None:
    """Offset of what already gives one of the edit's names here."""
    same = [literal]
    if literal.kind == "return":  # the dict that is returned
        same = [x for x in function.literals if x.kind == "dict" and x.name == literal.name]
    keys = [(literal.name, name) for name in edit.names]
    places = [x.entries.get(name) for x in same for name in edit.names]
    places += [table.get(key) for table in (function.stores, function.passed) for key in keys]
    return next((place for place in places if place is not None), None)


def _starts_its_line(source: bytes, offset: int) -> bool:
    return not source[_line_at(source, offset)[0] : offset].strip()


def _line_at(source: bytes, offset: int) -> tuple[int, bytes]:
    start = source.rfind(b"\n", 0, offset) + 1
    end = source.find(b"\n", offset)
    return start, source[start : end + 1 if end >= 0 else len(source)]


def _text(line: bytes) -> str:
    return line.strip().decode("utf-8", "replace")

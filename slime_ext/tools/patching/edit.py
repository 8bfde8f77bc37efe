"""One edit on the bytes of one file: found by syntax, inserted as a line of its own, removed as that line."""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slime_ext.errors import DataError
from slime_ext.tools.patching.declared import PARAMETER, Edit, Patch

OURS, HOST, ABSENT = "ours", "host", "absent"
KINDS = {"dict": ast.Dict, "strings": (ast.List, ast.Tuple, ast.Set), "return": ast.Return}
Read = Callable[[str], bytes | None]
Function = ast.FunctionDef | ast.AsyncFunctionDef


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
    anchor = edit.anchor
    hits = [
        (place.file, function, node)
        for place in edit.places
        if place.function.encode() in (read(place.file) or b"")
        for function in functions(read(place.file), place.file)
        if function.name == place.function
        for node in ast.walk(function)
        if isinstance(node, KINDS[anchor.kind]) and {*anchor.having, anchor.before} <= _entries(node).keys()
    ]
    if len(hits) != 1:
        raise _unknown(patch, edit, read, f"found {len(hits)} times, expected 1")
    file, function, node = hits[0]
    source = read(file)
    if (there := _present(edit, function, node)) is not None:
        offset = _offset(source, there)
        ours = _line_at(source, offset)[1].rstrip().endswith(patch.marker.encode())
        return Found(file, offset, OURS if ours else HOST)
    offset = _offset(source, _entries(node)[anchor.before])
    if why := _unfit(edit, function, source, offset):
        raise _unknown(patch, edit, read, why)
    return Found(file, offset, ABSENT)


@functools.lru_cache(maxsize=32)
def functions(source: bytes, where: str) -> list[Function]:
    """The functions and methods of a file, at any depth.

    Raises:
        DataError: the file does not parse.
    """
    try:
        source.decode()  # offsets are those of UTF-8
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the host's strings
            nodes = ast.walk(ast.parse(source))
    except (SyntaxError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"{where}: expected Python, got '{reason}': repair the file first") from error
    return [node for node in nodes if isinstance(node, Function)]


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
            text = line.strip().decode("utf-8", "replace")
            raise DataError(
                f"{file}:{number}: expected the line that patch {patch.id} inserted, got '{text}': "
                "restore or delete it by hand"
            )
        kept.append(line)
    return b"".join(kept)


def parameters(function: Function) -> set[str]:
    """The names that a function can be called with."""
    args = function.args
    return {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)}


def _unknown(patch: Patch, edit: Edit, read: Read, what: str) -> DataError:
    """The refusal: file, anchor, and what the patch is tested with."""
    place = next((p for p in edit.places if read(p.file) is not None), edit.places[0])
    return DataError(
        f"{place.file}: anchor {place.function} > {edit.anchor} {what}: patch {patch.id} ({edit.name}) is "
        f"tested with {patch.tested}; this host is another, nothing was written"
    )


def _entries(node: ast.AST) -> dict[str, ast.AST]:
    """What a line can stand in front of: a dict's keys, the strings of a list, a statement that returns a
    name."""
    if isinstance(node, ast.Return):
        return {node.value.id: node} if isinstance(node.value, ast.Name) else {}
    items = node.keys if isinstance(node, ast.Dict) else node.elts
    return {item.value: item for item in items if isinstance(item, ast.Constant)}


def _present(edit: Edit, function: Function, node: ast.AST) -> ast.AST | None:
    """What already gives one of the edit's names here: an entry, or what is put into the dict later."""
    named = {value: name for name, value in _assigned(function)}
    name, same = named.get(node), [node]
    if isinstance(node, ast.Return):  # the dict that is returned
        name = edit.anchor.before
        same = [value for value in named if named[value] == name and isinstance(value, ast.Dict)]
    given = {key: at for literal in same for key, at in _entries(literal).items()}
    given |= dict(_put_into(name, function))
    return next((given[key] for key in (edit.name, *edit.also_known_as) if key in given), None)


def _assigned(function: Function) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, value) of every assignment; several names where a value is taken apart."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
            yield from ((part.id, node.value) for part in names if isinstance(part.ctx, ast.Store))


def _put_into(name: str | None, function: Function) -> Iterator[tuple[str, ast.AST]]:
    """(key, place) of ``name[key] = …``, ``name.update(key=…)`` and ``call(**name, key=…)``."""
    for node in ast.walk(function):
        match node:
            case ast.Subscript(ast.Name(id), ast.Constant(key), ast.Store()) if id == name:
                yield key, node
            case ast.Call(keywords=keywords):
                spread = [keyword.value for keyword in keywords if keyword.arg is None]
                if isinstance(node.func, ast.Attribute) and node.func.attr == "update":
                    spread.append(node.func.value)
                if any(isinstance(value, ast.Name) and value.id == name for value in spread):
                    yield from ((keyword.arg, keyword) for keyword in keywords if keyword.arg)


def _unfit(edit: Edit, function: Function, source: bytes, offset: int) -> str:
    """Why our line cannot stand there; empty if it can."""
    results = {(name, _called(value)) for name, value in _assigned(function)}
    for name, callee in edit.needs.items():
        if callee == PARAMETER and name not in parameters(function):
            return f"found where {name} is not a parameter"
        if callee != PARAMETER and (name, callee) not in results:
            return f"found where {name} is not the result of {callee}"
    if source[_line_at(source, offset)[0] : offset].strip():
        return f"has '{edit.anchor.before}' not at the beginning of a line"
    return ""


def _called(value: ast.expr | None) -> str:
    """The last name of the function that is called."""
    function = value.func if isinstance(value, ast.Call) else None
    return getattr(function, "attr", "") or getattr(function, "id", "")


def _offset(source: bytes, node: ast.AST) -> int:
    return sum(map(len, source.splitlines(keepends=True)[: node.lineno - 1])) + node.col_offset


def _line_at(source: bytes, offset: int) -> tuple[int, bytes]:
    start = source.rfind(b"\n", 0, offset) + 1
    end = source.find(b"\n", offset)
    return start, source[start : end + 1 if end >= 0 else len(source)]

"""What a function of the host says, by libcst, with the byte offset of everything that can be an anchor."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from slime_ext.errors import DataError


@dataclass(frozen=True)
class Literal:
    """A dict, or a collection of strings: key -> byte offset of its entry, and the name that it is assigned
    to."""

    kind: str
    entries: dict[str, int]
    name: str | None = None


@dataclass
class Function:
    """Everything about one function that an edit can ask for."""

    literals: list[Literal] = field(default_factory=list)
    returns: list[tuple[str, int]] = field(default_factory=list)
    stores: dict[tuple[str, str], int] = field(default_factory=dict)  # name["key"] = …
    passed: dict[tuple[str, str], int] = field(
        default_factory=dict
    )  # call(**name, key=…), name.update(key=…)
    bound: set[tuple[str, str]] = field(default_factory=set)  # name = callee(…)
    parameters: set[str] = field(default_factory=set)


@functools.lru_cache(maxsize=32)
def functions(source: bytes, where: str) -> dict[str, list[Function]]:
    """name -> the functions and methods of that name, at any depth.

    Raises:
        DataError: the file does not parse, or libcst would not print it back byte for byte.
    """
    try:
        source.decode()  # offsets below are those of UTF-8
        module = cst.parse_module(source)
        intact = module.bytes == source
    except (cst.ParserSyntaxError, UnicodeError, SyntaxError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"{where}: expected Python, got '{reason}': repair the file first") from error
    if not intact:
        raise DataError(f"{where}: expected a file that parses without loss, got another: patch it by hand")
    reader = _Reader(len(codecs.BOM_UTF8) if source.startswith(codecs.BOM_UTF8) else 0)
    MetadataWrapper(module, unsafe_skip_copy=True).visit(reader)
    return reader.found


class _Reader(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (ByteSpanPositionProvider,)

    def __init__(self, first: int) -> None:
        self.first = first  # offset of what libcst counts from
        self.found: dict[str, list[Function]] = {}
        self.inside: list[Function] = []
        self.named: dict[cst.CSTNode, str] = {}

    def offset(self, node: cst.CSTNode) -> int:
        return self.first + self.get_metadata(ByteSpanPositionProvider, node).start

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        every = (*node.params.posonly_params, *node.params.params, *node.params.kwonly_params)
        function = Function(parameters={parameter.name.value for parameter in every})
        self.found.setdefault(node.name.value, []).append(function)
        self.inside.append(function)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self.inside.pop()

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in (assign.target for assign in node.targets):
            self._assigned(target, node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if node.value is not None:
            self._assigned(node.target, node.value)

    def _assigned(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        elements = target.elements if isinstance(target, cst.Tuple) else ()
        for name in (target, *(element.value for element in elements)):
            if isinstance(name, cst.Name):
                self.named[value] = name.value
                for function in self.inside:
                    function.bound.add((name.value, _callee(value)))
        if (key := _subscript(target)) is not None:
            for function in self.inside:
                function.stores[key] = self.offset(target)

    def visit_Call(self, node: cst.Call) -> None:
        spread = [
            arg.value.value for arg in node.args if arg.star == "**" and isinstance(arg.value, cst.Name)
        ]
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == "update":
            spread += [node.func.value.value] if isinstance(node.func.value, cst.Name) else []
        for function in self.inside:
            for arg in (arg for arg in node.args if arg.keyword is not None):
                function.passed.update({(name, arg.keyword.value): self.offset(arg) for name in spread})

    def visit_Return(self, node: cst.Return) -> None:
        if self.inside and isinstance(node.value, cst.Name):
            self.inside[-1].returns.append((node.value.value, self.offset(node)))

    def visit_Dict(self, node: cst.Dict) -> None:
        keyed = ((e.key, e) for e in node.elements if isinstance(e, cst.DictElement))
        self._literal("dict", node, keyed)

    def visit_List(self, node: cst.List) -> None:
        self._literal("strings", node, ((e.value, e) for e in node.elements))

    visit_Tuple = visit_Set = visit_List

    def _literal(self, kind: str, node: cst.CSTNode, keyed: Iterator) -> None:
        entries = {text: self.offset(key) for key, _ in keyed if (text := _string(key)) is not None}
        for function in self.inside:
            function.literals.append(Literal(kind, entries, self.named.get(node)))


def _string(node: cst.CSTNode) -> str | None:
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


def _callee(node: cst.BaseExpression) -> str:
    function = node.func if isinstance(node, cst.Call) else None
    function = function.attr if isinstance(function, cst.Attribute) else function
    return function.value if isinstance(function, cst.Name) else ""


def _subscript(node: cst.BaseExpression) -> tuple[str, str] | None:
    if not (isinstance(node, cst.Subscript) and isinstance(node.value, cst.Name) and len(node.slice) == 1):
        return None
    index = node.slice[0].slice
    key = _string(index.value) if isinstance(index, cst.Index) else None
    return None if key is None else (node.value.value, key)

"""Reads which sampling parameters a user's rollout function sets, from its source and without importing it.

A parameter is found in the forms in which the hosts' own examples pass it:

    sampling_params["min_p"] = 0.1
    sampling_params = {"temperature": 0.7}, dict(temperature=0.7), SamplingParams(temperature=0.7)
    payload = {"input_ids": ids, "sampling_params": {**sampling_params, "regex": pattern}}
    sampling_params.update(min_p=0.1), sampling_params |= {"min_p": 0.1}

Only the function itself is read, and what it calls in the same file. Evaluation, judges and rewards are left
out, because they train nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from slime_ext.rules.of_engines import SAMPLING
from slime_ext.rules.setup import UNREAD, Parameter

OF_OTHERS = (
    "eval",
    "judge",
    "reward",
    "grade",
    "critic",
    "teacher",
    "score",
    "scoring",
)  # in names: not the policy's answers
COPIES = ("copy", "deepcopy", "dict")


def parameters_of(text: str, function: str, file: str) -> list[Parameter]:
    """Returns the sampling parameters that a function or class of a module sets, in the order of the source.

    Args:
        text: the source of the module.
        function: the name of the function or class in it.
        file: the name of the file, for messages.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []  # whoever imports it says why
    nodes = list(_reached(tree, function))
    reader = _Reader(file, _constants(tree), _names(nodes))
    removed = {name for node in nodes for name in reader.removed(node)}
    by_place = {(each.where, each.name): each for node in nodes for each in reader.read(node)}
    kept = [each for each in by_place.values() if each.name not in removed]
    return sorted(kept, key=lambda each: int(each.where.rpartition(":")[2]))


def _reached(tree: ast.Module, function: str) -> Iterator[ast.AST]:
    """Yields each node of a function and of those that it mentions, except branches for evaluation."""
    defined: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.setdefault(node.name, []).append(node)
    waiting, seen = [function], {function}
    while waiting:
        for definition in defined.get(waiting.pop(), []):
            for node in _walk(definition):
                yield node
                name = _name(node)
                if name in defined and name not in seen and not _is_of_others(name):
                    seen.add(name)
                    waiting.append(name)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and _is_of_others(child.name):
            continue
        if isinstance(node, ast.If | ast.IfExp) and child in _branch_of_evaluation(node):
            continue
        yield from _walk(child)


def _branch_of_evaluation(node: ast.If | ast.IfExp) -> Sequence[ast.AST]:
    """Returns the branch that runs in an evaluation only; empty if the test does not ask for it."""
    test, is_negated = node.test, False
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, is_negated = test.operand, not is_negated
    if not any(_is_of_others(_name(part)) for part in ast.walk(test)):
        return ()
    branch = node.orelse if is_negated else node.body
    return branch if isinstance(branch, list) else [branch]


def _name(node: ast.AST) -> str:
    """Returns the name, the attribute or the argument that a node is; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.arg if isinstance(node, ast.arg) else ""


def _is_of_others(name: str) -> bool:
    return any(word in name.lower() for word in OF_OTHERS)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the names that a module sets once at its top level, with what it sets them to."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            values.setdefault(node.id, [])
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id].append(node.value)
    return {name: each[0] for name, each in values.items() if len(each) == 1}


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the names under which a function keeps sampling parameters, or a copy of them."""
    names: set[str] = set()
    for _ in range(3):  # a copy of a copy of a copy
        for node in nodes:
            if isinstance(node, ast.Assign) and _is_sampling(node.value, names):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _is_sampling(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is a mapping of sampling parameters, as far as its name tells."""
    if isinstance(node, ast.Name | ast.Attribute):
        name = _name(node)
        return name in names or ("sampling" in name.lower() and not _is_of_others(name))
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "sampling_params"
    if isinstance(node, ast.Call):
        inner = [*node.args[:1], *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        is_copy = _name(node.func) in COPIES and any(_is_sampling(each, names) for each in inner)
        return is_copy or _name(node.func) == "SamplingParams"
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and _is_sampling(node.left, names)
    if isinstance(node, ast.Dict):
        spread = (value for key, value in zip(node.keys, node.values, strict=True) if key is None)
        return any(_is_sampling(value, names) for value in spread)
    return False


class _Reader:
    """Reads parameters from the statements and expressions that set them."""

    def __init__(self, file: str, constants: dict[str, ast.expr], names: set[str]) -> None:
        self._file, self._constants, self._names = file, constants, names

    def read(self, node: ast.AST) -> Iterator[Parameter]:
        """Yields what a node sets."""
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            yield from self._assignment(node, node.value)
        elif isinstance(node, ast.Dict):
            yield from self._display(node)
        elif isinstance(node, ast.BinOp) and self._is_sampling(node):
            yield from self._mapping(node.right)
        elif isinstance(node, ast.Call):
            yield from self._call(node)

    def removed(self, node: ast.AST) -> Iterator[str]:
        """Yields the names of parameters that a node takes away."""
        keys: list[ast.expr] = []
        if isinstance(node, ast.Delete):
            places = (target for target in node.targets if isinstance(target, ast.Subscript))
            keys = [place.slice for place in places if self._is_sampling(place.value)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pop":
            keys = node.args[:1] if self._is_sampling(node.func.value) else []
        yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))

    def _assignment(
        self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, value: ast.expr
    ) -> Iterator[Parameter]:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Subscript) and self._is_sampling(target.value):
                yield from self._item(target.slice, value, node)
            elif self._is_sampling(target):
                yield from self._mapping(value)

    def _display(self, node: ast.Dict) -> Iterator[Parameter]:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "sampling_params":
                yield from self._mapping(value)
        if self._is_sampling(node):
            yield from self._mapping(node)

    def _call(self, node: ast.Call) -> Iterator[Parameter]:
        for keyword in node.keywords:
            if keyword.arg == "sampling_params":
                yield from self._mapping(keyword.value)
        method = node.func
        if isinstance(method, ast.Attribute) and self._is_sampling(method.value):
            if method.attr == "update":
                yield from (each for mapping in node.args for each in self._mapping(mapping))
                yield from self._keywords(node)
            elif method.attr == "setdefault" and len(node.args) == 2:
                yield from self._item(node.args[0], node.args[1], node)
        elif self._is_sampling(node):
            yield from self._keywords(node)

    def _mapping(self, node: ast.AST) -> Iterator[Parameter]:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None:
                    yield from self._item(key, value, key)
        elif isinstance(node, ast.Call) and _name(node.func) in ("dict", "SamplingParams"):
            yield from self._keywords(node)
        elif isinstance(node, ast.BinOp):
            yield from (each for side in (node.left, node.right) for each in self._mapping(side))

    def _keywords(self, node: ast.Call) -> Iterator[Parameter]:
        for keyword in node.keywords:
            if keyword.arg:
                yield from self._item(ast.Constant(keyword.arg), keyword.value, keyword.value)

    def _item(self, key: ast.AST, value: ast.expr, node: ast.expr | ast.stmt) -> Iterator[Parameter]:
        name = key.value if isinstance(key, ast.Constant) else None
        if name in SAMPLING and not self._is_of_the_host(value, str(name)):
            yield Parameter(f"{self._file}:{node.lineno}", str(name), self._value(value))

    def _is_of_the_host(self, value: ast.AST, name: str) -> bool:
        """Whether a value is the host's own: ``args.rollout_top_p``, or one that it passes."""
        if isinstance(value, ast.Attribute):
            return value.attr == f"rollout_{name}"
        if isinstance(value, ast.Subscript):
            return self._is_sampling(value.value)
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
            return False
        return value.func.attr in ("get", "pop") and self._is_sampling(value.func.value)

    def _value(self, node: ast.expr) -> object:
        node = self._constants.get(node.id, node) if isinstance(node, ast.Name) else node
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return UNREAD

    def _is_sampling(self, node: ast.AST) -> bool:
        return _is_sampling(node, self._names)

"""Follows a shell script without running it: what it would start, as far as its text says.

Such scripts end every Python process of the machine before they start their own, so nothing of them is
executed. tree-sitter-bash reads the grammar. Where a branch hangs on what only the machine of the run knows,
both are followed and what they leave behind is merged: a value that they do not share is unknown.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_ext.errors import ConfigError
from slime_ext.scripts import commands
from slime_ext.scripts.conditions import Asked, Condition, Term
from slime_ext.scripts.expansion import Expansion, Kind, RefusedError, touching
from slime_ext.scripts.state import Array, Held, Reference, State, merged_states
from slime_ext.scripts.values import Unknown, Value, Words, collapsed, joined, known, merged_words, shown, value

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

MOST = 20_000  # commands that a reading follows
DEEPEST = 60  # functions, sourced files and substitutions inside one another
ROUNDS = 1_000  # of a loop
UNSURE_ROUNDS = 4  # of one whose number of rounds is unknown


class Flow(Enum):
    """How a statement ends: the next one follows, or it leaves a loop, a function, the script."""

    NEXT = 0
    CONTINUE = 1
    BREAK = 2
    RETURN = 3
    EXIT = 4


@functools.cache
def parser() -> Parser:
    """The parser of bash."""
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


class Shell:
    """Reads one script, the files that it sources, and the texts that it evaluates.

    Args:
        script: its path.
        given: its own flags, which a shell has as ``$@``.
        folders: where a relative path is looked for while the working directory is the caller's.
    """

    def __init__(self, script: str, given: Sequence[str], folders: Sequence[Path]) -> None:
        self.script, self.folders = str(Path(script).absolute()), folders
        self.state = State(positional=[value(word) for word in given], folder=(Unknown("$(pwd)"),))
        self.state.variables |= {name: value(text) for name, text in os.environ.items() if name != "PWD"}
        self.files: dict[str, str] = {}
        self.words: Words = []  # of all commands, arrays and scalars, in their order
        self.commands: list[Words] = []
        self.read: set[str] = set()  # arrays that something looks at
        self.unread: list[Unknown] = []  # what could not be followed
        self.broken: list[Unknown] = []  # what the grammar has no reading of
        self.needs: dict[str, str] = {}  # variables without which bash ends the script -> where
        self.ended = ""  # where an ``exit`` ended the script
        self.lost: list[str] = []  # arrays of flags that stand as commands of their own
        self.left: list[tuple[Flow, State]] = []  # states that left a loop or a function where it was unsure
        self.zero = value(self.script)
        self.text, self.file, self.line, self.offset = b"", script, 0, 0
        self.count = self.depth = self.asking = 0
        self.expand = Expansion(self)

    # files

    def follow(self, path: str, text: str) -> Flow:
        """Follows a file's every statement."""
        self.files[path] = text
        flow = self.evaluate(text, path)
        self.ended = self.place if flow is Flow.EXIT else ""
        return flow

    def evaluate(self, text: str, path: str | None = None, first_line: int = 0) -> Flow:
        """Follows a text.

        Raises:
            ConfigError: it is nested without end.
        """
        if self.depth >= DEEPEST:
            raise ConfigError(f"{self.place}: expected at most {DEEPEST} calls in one another, got more")
        before = self.text, self.file, self.line, self.offset
        self.text, self.depth = text.rstrip("\\\n").encode() + b"\n", self.depth + 1
        self.file, self.offset = path or self.file, first_line
        try:
            root = parser().parse(self.text).root_node
            self._note_errors(root)
            return self.block(root.children)
        finally:
            self.text, self.file, _, self.offset = before
            self.depth -= 1

    def _note_errors(self, root: Node) -> None:
        if root.has_error:
            node = next(_errors(root))
            said = self.source(node).strip().split("\n")[0][:40]
            self.broken.append(Unknown(said or "a syntax error", self.place_of(node), many=True, flags=None))

    def source(self, node: Node) -> str:
        """A node's text."""
        return self.text[node.start_byte : node.end_byte].decode(errors="replace")

    def place_of(self, node: Node) -> str:
        """``file:line`` of a node."""
        lead = self.source(node)
        row = node.start_point[0] + lead[: len(lead) - len(lead.lstrip())].count("\n")
        return f"{Path(self.file).name}:{self.offset + row + 1}"

    @property
    def place(self) -> str:
        """``file:line`` of the command that is followed."""
        return f"{Path(self.file).name}:{self.line}"

    # variables

    def held(self, name: str) -> Held | None:
        """What a variable holds."""
        return self.state.variables.get(self.state.resolved_name(name))

    def nothing(self, name: str) -> Value:
        """What a variable that nothing has set expands to."""
        if self.state.unread:
            text = f"${name} ({self.state.unread.text} is not here)"
            return (Unknown(text, self.state.unread.where, many=True, flags=None),)
        if self.state.stops_at_unset:
            self.needs.setdefault(name, self.place)
            return (Unknown(f"${name}", self.place, many=True, flags=None, is_text=True),)
        return (Unknown(f"${name}", self.place, unset=True, many=True),)

    def scalar(self, name: str) -> Value:
        """A variable's value; of an array its first element."""
        if name == "PWD":
            return self.state.folder
        if name in ("BASH_SOURCE", "0"):
            return value(str(Path(self.file).absolute()))
        found = self.held(name)
        if isinstance(found, Array):
            self.read.add(name)
            first = found.elements.get(0)
            return first if first is not None and found.is_exact else self._of_array(name, found)
        return self.nothing(name) if not isinstance(found, tuple) else found

    def _of_array(self, name: str, found: Array) -> Value:
        return () if found.is_exact else (Unknown(f"${name}", self.place),)

    def element(self, name: str, index: str) -> Value:
        """An element of an array."""
        if name == "BASH_SOURCE":
            return self.scalar(name)
        found = self.held(name)
        self.read.add(self.state.resolved_name(name))
        if isinstance(found, Array) and found.by_key:
            return found.elements.get(index, self.nothing(f"{name}[{index}]"))
        number = self.expand.computed(index)
        whole = found if isinstance(found, Array) else Array({0: found} if isinstance(found, tuple) else {})
        if number is None or not whole.is_exact:
            return (Unknown(f"${{{name}[{index}]}}", self.place),)
        keys = list(whole.elements)
        if number < 0 and keys:
            number += int(keys[-1]) + 1
        return whole.elements.get(number, self.nothing(f"{name}[{index}]"))

    def array_words(self, name: str) -> Words:
        """The elements of an array, of a scalar its value."""
        if name == "BASH_SOURCE":
            return [self.scalar(name)]
        found = self.held(name)
        self.read.add(self.state.resolved_name(name))
        if found is None:
            return [self.nothing(name)] if self.state.unread else []
        if isinstance(found, Array):
            if found.by_key and len(found.elements) > 1:
                return [(Unknown(f"${{{name}[@]}}", self.place, many=True, flags=None),)]
            return found.words
        return [found] if isinstance(found, tuple) else []

    def assign(self, name: str, held: Held) -> None:
        """Sets a variable, or what it stands for."""
        self.state.variables[self.state.resolved_name(name)] = held

    # statements

    def block(self, nodes: Sequence[Node]) -> Flow:
        """Statements one after another; one before ``&`` in a shell of its own."""
        flow = Flow.NEXT
        for i, node in enumerate(nodes):
            if not node.is_named or node.type == "comment":
                continue
            is_background = i + 1 < len(nodes) and nodes[i + 1].type == "&"
            flow = self.apart(lambda node=node: self.run(node)) if is_background else self.run(node)
            if flow is not Flow.NEXT:
                break
        return flow

    def run(self, node: Node) -> Flow:
        """Follows one statement.

        Raises:
            ConfigError: the script has more commands than a launch script needs.
        """
        self.count, self.line = self.count + 1, self.offset + node.start_point[0] + 1
        if self.count > MOST:
            raise ConfigError(f"{self.place}: expected a script of at most {MOST} commands, got more")
        follow = getattr(self, f"_{node.type}", None)
        if follow is None:
            return self.block(node.children) if node.named_child_count else Flow.NEXT
        flow = follow(node)
        fails = self.state.status not in (0, None) and flow is Flow.NEXT and not self.asking
        if fails and self.state.stops_at_errors and node.type in ("command", "test_command", "subshell"):
            return Flow.EXIT
        return flow

    def _program(self, node: Node) -> Flow:
        return self.block(node.children)

    def _ERROR(self, node: Node) -> Flow:  # noqa: N802
        return self.block([n for n in node.children if n.type in ("command", "variable_assignment", "declaration_command", "if_statement", "list", "pipeline", "redirected_statement")])

    def _compound_statement(self, node: Node) -> Flow:
        if node.children and node.children[0].type == "((":
            found = self.expand.number(node.children, node.start_byte + 2, node.end_byte - 2)
            self.state.status = None if found is None else int(found == 0)
            return Flow.NEXT
        return self.block(node.children)

    _do_group = _compound_statement

    def _subshell(self, node: Node) -> Flow:
        return self.apart(lambda: self.block(node.children))

    def apart(self, follow: Callable[[], Flow]) -> Flow:
        """Follows something in a shell of its own: its launches stay, and what it writes."""
        outer, left = self.state.copied(), len(self.left)
        follow()
        inner = self.state
        for _, state in self.left[left:]:
            inner = merged_states(inner, state, Unknown("a branch", self.place))
        del self.left[left:]
        outer.started, outer.out, outer.status = inner.started, inner.out, inner.status
        self.state = outer
        return Flow.NEXT

    def _list(self, node: Node) -> Flow:
        left, sign, right = node.children[0], node.children[1].type, node.children[-1]
        with self.asked():
            flow = self.run(left)
        if flow is not Flow.NEXT:
            return flow
        status = self.state.status
        if status is not None:
            return self.run(right) if (status == 0) == (sign == "&&") else Flow.NEXT
        return self.either(lambda: self.run(right), lambda: Flow.NEXT, self._why(left))

    def _why(self, node: Node) -> Unknown:
        text = " ".join(self.source(node).split())
        return Unknown(text if len(text) <= 60 else f"{text[:57]}...", f"{Path(self.file).name}:{self.offset + node.start_point[0] + 1}")

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Where a command's failure is an answer and ends nothing."""
        self.asking += 1
        try:
            yield
        finally:
            self.asking -= 1

    def _negated_command(self, node: Node) -> Flow:
        with self.asked():
            flow = self.block(node.children)
        if self.state.status is not None:
            self.state.status = int(self.state.status == 0)
        return flow

    def either(self, one: Callable[[], Flow], other: Callable[[], Flow], why: Unknown) -> Flow:
        """Follows two branches of which either can be taken."""
        start = self.state.copied()
        flow = one()
        first, self.state = self.state, start
        second_flow = other()
        second = self.state
        if flow is second_flow:
            self.state = merged_states(first, second, why)
            return flow
        if Flow.NEXT not in (flow, second_flow):
            self.state = merged_states(first, second, why)
            return min(flow, second_flow, key=lambda f: f.value)
        goes, leaves, how = (first, second, second_flow) if flow is Flow.NEXT else (second, first, flow)
        self.state = goes
        if how is Flow.EXIT:
            extra = {k: s for k, s in leaves.started.items() if k not in goes.started}
            self.state.started = {**extra, **goes.started}
        else:
            self.left.append((how, leaves))
        return Flow.NEXT

    def _if_statement(self, node: Node) -> Flow:
        parts = node.children
        then = next(i for i, part in enumerate(parts) if part.type == "then")
        ends = [i for i, part in enumerate(parts) if part.type in ("elif_clause", "else_clause", "fi")]
        end = ends[0] if ends else len(parts)
        rest = [part for part in parts[end:] if part.type in ("elif_clause", "else_clause")]
        return self._branch(parts[1:then], parts[then + 1 : end], rest)

    def _branch(self, test: Sequence[Node], body: Sequence[Node], rest: Sequence[Node]) -> Flow:
        with self.asked():
            flow = self.block(test)
        if flow is not Flow.NEXT:
            return flow
        status = self.state.status
        if status is None:
            why = self._why(next((n for n in test if n.is_named), test[0]))
            return self.either(lambda: self.block(body), lambda: self._otherwise(rest), why)
        return self.block(body) if status == 0 else self._otherwise(rest)

    def _otherwise(self, rest: Sequence[Node]) -> Flow:
        self.state.status = 0
        if not rest:
            return Flow.NEXT
        parts = rest[0].children
        if rest[0].type == "else_clause":
            return self.block(parts[1:])
        then = next(i for i, part in enumerate(parts) if part.type == "then")
        return self._branch(parts[1:then], parts[then + 1 :], rest[1:])

    def _case_statement(self, node: Node) -> Flow:
        subject = self.expand.text(node.child_by_field_name("value"))
        items = [child for child in node.children if child.type == "case_item"]
        return self._case(known(subject), items, self._why(node))

    def _case(self, text: str | None, items: Sequence[Node], why: Unknown) -> Flow:
        if not items:
            return Flow.NEXT
        patterns = items[0].children_by_field_name("value")
        close = next(i for i, n in enumerate(items[0].children) if n.type == ")")
        body = [n for n in items[0].children[close + 1 :] if n.type not in (";;", ";&", ";;&")]
        regexes = [self.expand.pattern([n], n.start_byte, n.end_byte) for n in patterns]
        if ".*" in regexes or (text is not None and any(r is not None and re.fullmatch(r, text, re.DOTALL) for r in regexes)):
            return self.block(body)
        if text is None or None in regexes:
            return self.either(lambda: self.block(body), lambda: self._case(text, items[1:], why), why)
        return self._case(text, items[1:], why)

    # loops

    def _for_statement(self, node: Node) -> Flow:
        name = self.source(node.child_by_field_name("variable"))
        values = node.children_by_field_name("value")
        has_in = any(child.type == "in" for child in node.children)
        words = self.expand.words(values) if has_in else list(self.state.positional)
        body = node.child_by_field_name("body")
        is_select = node.children[0].type == "select"
        if is_select or any(w and any(isinstance(p, Unknown) and p.many and not p.unset for p in w) for w in words):
            def enter() -> Flow:
                self.assign(name, (Unknown(f"${name}", self.place),))
                return self.run(body)

            return self._unsure(enter, self._why(node))

        rounds = iter([w for w in words if not (w and all(isinstance(p, Unknown) and p.unset and p.many for p in w))])

        def begins() -> bool:
            word = next(rounds, None)
            if word is not None:
                self.assign(name, word)
            return word is not None

        return self._rounds(begins, lambda: self.run(body), node)

    def _c_style_for_statement(self, node: Node) -> Flow:
        part = node.child_by_field_name
        first, test, step, body = part("initializer"), part("condition"), part("update"), part("body")
        number = lambda n: 1 if n is None else self.expand.number([n], n.start_byte, n.end_byte)  # noqa: E731
        for child in node.children:
            if child.type == ";":
                break
            if child.is_named:
                number(child)
        state = {"first": True}

        def begins() -> bool | None:
            if not state["first"] and step is not None:
                number(step)
            state["first"] = False
            found = number(test)
            return None if found is None else found != 0

        del first
        body = body or next(c for c in node.children if c.type in ("do_group", "compound_statement"))
        return self._rounds(begins, lambda: self.run(body), node)

    def _while_statement(self, node: Node) -> Flow:
        test = node.children_by_field_name("condition")
        wanted = node.children[0].type == "while"
        body = node.child_by_field_name("body")

        def begins() -> bool | None:
            with self.asked():
                self.block(test)
            status = self.state.status
            return None if status is None else (status == 0) is wanted

        return self._rounds(begins, lambda: self.run(body), node)

    def _rounds(self, begins: Callable[[], bool | None], body: Callable[[], Flow], node: Node) -> Flow:
        """A loop whose number of rounds is known as long as ``begins`` knows whether one more begins."""
        why, left = self._why(node), len(self.left)
        flow = Flow.NEXT
        for _ in range(ROUNDS):
            goes = begins()
            if not goes:
                break
            before = self.state.copied()
            flow = self._body(body, left, why)
            if flow is not Flow.NEXT:
                break
            if node.type == "while_statement" and self.state.same_as(before):
                return self._joined(Flow.EXIT, left, why)  # it never ends by itself
        else:
            goes = None
        if goes is None:
            flow = self._unsure(body, why)
        return self._joined(Flow.NEXT if flow in (Flow.BREAK, Flow.CONTINUE) else flow, left, why)

    def _body(self, body: Callable[[], Flow], left: int, why: Unknown) -> Flow:
        flow = body()
        for how, state in [pair for pair in self.left[left:] if pair[0] is Flow.CONTINUE]:
            self.left.remove((how, state))
            self.state = merged_states(self.state, state, why) if flow is Flow.NEXT else state
            flow = Flow.NEXT
        return Flow.NEXT if flow is Flow.CONTINUE else flow

    def _joined(self, flow: Flow, left: int, why: Unknown) -> Flow:
        """The flow behind a loop, with the states that left it by ``break`` merged in."""
        for how, state in [pair for pair in self.left[left:] if pair[0] is Flow.BREAK]:
            self.left.remove((how, state))
            self.state = merged_states(self.state, state, why) if flow is Flow.NEXT else state
            flow = Flow.NEXT
        return flow

    def _unsure(self, body: Callable[[], Flow], why: Unknown) -> Flow:
        """A loop of an unknown number of rounds, none among them."""
        left = len(self.left)
        for _ in range(UNSURE_ROUNDS):
            before = self.state.copied()
            flow = self._body(body, left, why)
            after = self.state
            if flow is Flow.EXIT:
                self.state = before
                self.state.started = {**after.started, **before.started}
                break
            self.state = merged_states(before, after, why)
            if self.state.same_as(before):
                break
        else:
            for name in [n for n, h in self.state.variables.items() if h != before.variables.get(n)]:
                is_array = isinstance(self.state.variables[name], Array)
                gap: Value = (Unknown(f"${name}", why.where, many=True, flags=None),)
                self.state.variables[name] = Array({0: gap}) if is_array else gap
        return self._joined(Flow.NEXT, left, why)

    # functions

    def _function_definition(self, node: Node) -> Flow:
        name = self.source(node.child_by_field_name("name"))
        self.state.functions[name] = (node.child_by_field_name("body"), self.text, self.file, self.offset)
        self.state.status = 0
        return Flow.NEXT

    def call(self, name: str, words: Words) -> Flow:
        """Calls a function of the script."""
        body, text, file, offset = self.state.functions[name]
        if self.depth >= DEEPEST:
            raise ConfigError(f"{self.place}: expected at most {DEEPEST} calls in one another, got more")
        before = self.text, self.file, self.line, self.offset, self.state.positional
        left = len(self.left)
        self.text, self.file, self.offset, self.depth = text, file, offset, self.depth + 1
        self.state.positional = words
        self.state.locals.append({})
        try:
            flow = self.run(body)
        finally:
            self.text, self.file, self.line, self.offset, positional = before
            self.depth -= 1
        why = Unknown(f"{name}: a return", self.place)
        for how, state in [pair for pair in self.left[left:] if pair[0] is Flow.RETURN]:
            self.left.remove((how, state))
            self.state = merged_states(self.state, state, why) if flow is not Flow.EXIT else state
            flow = Flow.NEXT
        self._restore(self.state.locals.pop())
        self.state.positional = positional
        return Flow.EXIT if flow is Flow.EXIT else Flow.NEXT

    def _restore(self, frame: dict[str, Held | None]) -> None:
        for name, held in frame.items():
            if held is None:
                self.state.variables.pop(name, None)
            else:
                self.state.variables[name] = held

    # assignments

    def _variable_assignments(self, node: Node) -> Flow:
        return self.block(node.children)

    def _variable_assignment(self, node: Node) -> Flow:
        self.state.status = 0
        name, held = self.assignment(node)
        self.assign(name, held)
        return Flow.NEXT

    def assignment(self, node: Node, *, by_key: bool = False) -> tuple[str, Held]:
        """A variable and what an assignment makes of it."""
        left, right = node.child_by_field_name("name"), node.child_by_field_name("value")
        adds = any(child.type == "+=" for child in node.children)
        if left.type == "subscript":
            return self._element_assignment(left, right, adds=adds)
        name = self.source(left)
        before = self.held(name)
        if right is not None and right.type == "array":
            found = self._array(right, before if isinstance(before, Array) and (adds or before.by_key) else Array(by_key=by_key), adds=adds)
            if adds and isinstance(before, tuple):
                found = Array({0: before}).with_words(found.words)
            self.words += found.words
            return name, found
        found_text = self.expand.text(right)
        if adds:
            if isinstance(before, Array):
                first = before.elements.get(0, ())
                return name, before.with_element(0, joined(first, found_text))
            found_text = joined(before if isinstance(before, tuple) else (), found_text)
        self._note_text(found_text)
        return name, found_text

    def _note_text(self, text: Value) -> None:
        said = known(text)
        if said is not None and said.lstrip().startswith("--"):
            self.words += [value(word) for word in said.split()]

    def _array(self, node: Node, before: Array, *, adds: bool) -> Array:
        found = before if adds else Array(by_key=before.by_key)
        for child, *others in touching(node.named_children):
            if child.type == "variable_assignment":
                left = child.child_by_field_name("name")
                found = self._put(found, self.expand.subscript(left.child_by_field_name("index")), self.expand.text(child.child_by_field_name("value")))
                continue
            keyed = self.source(child)
            if child.type == "concatenation" and keyed.startswith("[") and "]=" in keyed:
                text = known(self.expand.text(child)) or ""
                key, _, said = text[1:].partition("]=")
                found = self._put(found, key, value(said) if text else (Unknown(keyed, self.place),))
            elif child.type != "comment":
                found = found.with_words(self.expand.fields([child, *others]))
        return Array(dict(enumerate(collapsed(found.words)))) if not (found.is_exact or found.by_key) else found

    def _put(self, array: Array, index: str, word: Value) -> Array:
        if array.by_key:
            return array.with_element(index, word)
        number = self.expand.computed(index)
        if number is None or not array.is_exact:
            return Array({0: (Unknown(f"[{index}]", self.place, many=True, flags=None),)})
        if number < 0 and array.elements:
            number += int(list(array.elements)[-1]) + 1
        return array.with_element(number, word)

    def _element_assignment(self, left: Node, right: Node | None, *, adds: bool) -> tuple[str, Held]:
        name = self.source(left.child_by_field_name("name"))
        index = self.expand.subscript(left.child_by_field_name("index"))
        before = self.held(name)
        array = before if isinstance(before, Array) else Array({0: before} if isinstance(before, tuple) else {})
        word = self.expand.text(right)
        if adds:
            old = self.element(name, index)
            word = joined(() if known(old) == "" else old, word)
        self.words.append(word)
        return name, self._put(array, index, word)

    def _declaration_command(self, node: Node) -> Flow:
        kind = self.source(node.children[0])
        flags = "".join(self.source(c) for c in node.named_children if c.type == "word" and self.source(c).startswith("-"))
        for child in node.named_children:
            is_name = child.type == "variable_name" or (child.type == "word" and not self.source(child).startswith("-"))
            if child.type == "variable_assignment":
                name, held = self.assignment(child, by_key="A" in flags)
            elif is_name:
                name, held = self.source(child), self.held(self.source(child))
            else:
                continue
            self._declared(kind, flags, name, held)
        self.state.status = 0
        return Flow.NEXT

    def _declared(self, kind: str, flags: str, name: str, held: Held | None) -> None:
        state = self.state
        is_local = kind == "local" or (kind in ("declare", "typeset") and "g" not in flags)
        if is_local and state.locals:
            state.locals[-1].setdefault(name, state.variables.pop(name, None))
        if "n" in flags and kind != "export" and isinstance(held, tuple):
            state.variables[name] = Reference(known(held) or "")
        elif held is None and ("a" in flags or "A" in flags):
            state.variables[name] = Array(by_key="A" in flags)
        elif held is not None and not (is_local and held is None):
            if "i" in flags and isinstance(held, tuple) and (text := known(held)) is not None:
                number = self.expand.computed(text)
                held = value(str(number)) if number is not None else held
            self.assign(name, held)
        if kind == "export" or "x" in flags:
            state.exported |= {name}

    def _unset_command(self, node: Node) -> Flow:
        for child in node.named_children:
            text = known(self.expand.text(child)) or ""
            name, _, index = text.rstrip("]").partition("[")
            if text.startswith("-"):
                continue
            if not index:
                self.state.variables.pop(self.state.resolved_name(name), None)
                self.state.functions.pop(name, None)
            elif isinstance(held := self.held(name), Array):
                key: int | str | None = index if held.by_key else self.expand.computed(index)
                self.assign(name, Array({k: v for k, v in held.elements.items() if k != key}, by_key=held.by_key))
        self.state.status = 0
        return Flow.NEXT

    # tests

    def _test_command(self, node: Node) -> Flow:
        opening = self.source(node.children[0])
        if opening == "((":
            found = self.expand.number(node.children, node.start_byte + 2, node.end_byte - 2)
            self.state.status = None if found is None else int(found == 0)
            return Flow.NEXT
        double = opening == "[["
        self.tested([t for child in node.children[1:-1] for t in self._terms(child, double)], double=double)
        return Flow.NEXT

    def _terms(self, node: Node, double: bool) -> Iterator[Term]:
        if node.type in ("binary_expression", "unary_expression", "parenthesized_expression", "negated_expression", "list"):
            for child in node.children:
                yield from self._terms(child, double)
        elif not node.is_named or node.type == "test_operator":
            yield Term(value(self.source(node)), is_operator=True)
        elif double:
            is_regex = node.prev_sibling is not None and node.prev_sibling.type == "=~"
            pattern = self.expand.pattern([node], node.start_byte, node.end_byte) if not is_regex else None
            yield Term(self.expand.text(node), pattern=pattern)
        else:
            yield from (Term(word) for word in self.expand.fields([node]))

    def tested(self, terms: Sequence[Term], *, double: bool = False) -> None:
        """Sets the status to what a test says."""
        kept = [t for t in terms if double or not (t.value and all(isinstance(p, Unknown) and p.unset and p.many for p in t.value))]
        asked = Asked(self.file_is, lambda name: self.held(name) is not None, self._number)
        try:
            held = Condition(list(kept), asked, double=double).holds()
        except _UnknownNumberError:
            held = None
        except ValueError:
            self.state.status = 2
            return
        self.state.status = None if held is None else int(not held)

    def _number(self, text: str) -> int:
        found = self.expand.computed(text)
        if found is None:
            raise _UnknownNumberError
        return found

    def file_is(self, sign: str, name: str) -> bool | None:
        """Whether a test of a file holds: of what lies here beside the script, else it is unknown."""
        path = self.path_of(value(name))
        near = self.folders[0] if self.folders else None
        if not name:
            return False
        if path is None or not path.exists() or near is None or not path.resolve().is_relative_to(near):
            return None
        return {"f": path.is_file, "d": path.is_dir, "e": path.exists, "r": path.exists}.get(sign[1], lambda: None)()

    def path_of(self, name: Value) -> Path | None:
        """The file that a path means where the script runs; None where that is unknown."""
        text, folder = known(name), known(self.state.folder)
        if not text:
            return None
        if Path(text).is_absolute() or folder is not None:
            return Path(folder or "/", text)
        return next((root / text for root in self.folders if (root / text).exists()), self.folders[-1] / text)

    def _test_operator(self, node: Node) -> Flow:
        return Flow.NEXT

    # commands

    def _command(self, node: Node) -> Flow:
        return self._redirected(node, [])

    def _redirected_statement(self, node: Node) -> Flow:
        body = node.child_by_field_name("body")
        redirects = node.children_by_field_name("redirect")
        if body is None:
            self.state.status = 0
            return Flow.NEXT
        return self._with_output(redirects, lambda: self._redirected(body, redirects) if body.type == "command" else self.run(body))

    def _with_output(self, redirects: Sequence[Node], follow: Callable[[], Flow]) -> Flow:
        if not any(self._takes_output(r) for r in redirects):
            return follow()
        before = list(self.state.out)
        flow = follow()
        self.state.out = before
        return flow

    def _takes_output(self, node: Node) -> bool:
        if node.type != "file_redirect":
            return any(self._takes_output(n) for n in node.children if n.type == "file_redirect")
        sign = next((c.type for c in node.children if not c.is_named), "")
        descriptor = node.child_by_field_name("descriptor")
        return sign in (">", ">>", "&>", "&>>", ">|", ">&") and (descriptor is None or self.source(descriptor) == "1")

    def _redirected(self, node: Node, redirects: Sequence[Node]) -> Flow:
        inner = [child for child in node.children if child.type in ("file_redirect", "herestring_redirect", "heredoc_redirect")]
        if inner and not redirects:
            return self._with_output(inner, lambda: self._simple(node, inner))
        return self._simple(node, [*redirects, *inner])

    def _simple(self, node: Node, redirects: Sequence[Node]) -> Flow:
        name = node.child_by_field_name("name")
        assigned = [c for c in node.children if c.type == "variable_assignment"]
        if name is None:
            return self.block(assigned)
        arguments = [c for c in node.children_by_field_name("argument")]
        try:
            words = [w for w in self.expand.words([*name.children, *arguments]) if not _is_nothing(w)]
        except RefusedError:
            self.state.status = 1
            return Flow.NEXT
        if any(self.source(n).strip().startswith("${") and "[@]" in self.source(n) for n in name.children):
            self.lost.append(f"{self.place_of(name)}\0{self.source(name).strip()}")
        return commands.follow(self, words, [self.assignment(a) for a in assigned], self._standard_input(redirects), node)

    def _standard_input(self, redirects: Sequence[Node]) -> Value | None:
        for node in redirects:
            if node.type == "herestring_redirect":
                return self.expand.text(node.named_children[0])
            if node.type == "heredoc_redirect":
                return self.heredoc(node)
        return None

    def heredoc(self, node: Node) -> Value:
        """What a here-document says."""
        body = next((c for c in node.children if c.type == "heredoc_body"), None)
        start = next(c for c in node.children if c.type == "heredoc_start")
        if body is None:
            return ()
        if self.source(start)[:1] in "'\"\\":
            return value(self.source(body))
        begin = self.text.index(b"\n", start.end_byte) + 1
        return self.expand.joined(list(self.expand.span(body.children, begin, body.end_byte, Kind.QUOTED)))

    def _pipeline(self, node: Node) -> Flow:
        return self.apart(lambda: self._piped(node))

    def _piped(self, node: Node) -> Flow:
        parts = [child for child in node.children if child.is_named and child.type != "comment"]
        before, given = self.state.out, None
        for i, part in enumerate(parts):
            self.state.out = []
            if i:
                commands.follow_piped(self, part, given)
            else:
                self.apart(lambda part=part: self.run(part))
            given = value(*(p for word in self.state.out for p in word))
        self.state.out = [*before, given or ()]
        return Flow.NEXT

    def output_of(self, node: Node) -> Value:
        """What a command substitution writes."""
        before, self.state.out = self.state.out, []
        flow_depth, self.depth = self.depth, self.depth + 1
        if self.depth > DEEPEST:
            raise ConfigError(f"{self.place}: expected at most {DEEPEST} calls in one another, got more")
        self.apart(lambda: self.block([c for c in node.children if c.is_named or c.type == "&"]))
        self.depth = flow_depth
        found = value(*(part for word in self.state.out for part in word))
        self.state.out = before
        if found and isinstance(found[-1], str):
            found = value(*found[:-1], found[-1].rstrip("\n"))
        return found


class _UnknownNumberError(Exception):
    """A sum of which a part is unknown."""


def _is_nothing(word: Value) -> bool:
    return bool(word) and all(isinstance(part, Unknown) and part.unset and part.many for part in word)


def _errors(node: Node) -> Iterator[Node]:
    if node.type == "ERROR" or node.is_missing:
        yield node
    for child in node.children:
        if child.has_error or child.is_missing:
            yield from _errors(child)

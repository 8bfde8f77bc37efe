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
from pathlib import Path
from typing import TYPE_CHECKING

from slime_ext.errors import ConfigError
from slime_ext.tools.scripts import commands
from slime_ext.tools.scripts.conditions import Tests
from slime_ext.tools.scripts.expansion import Expansion
from slime_ext.tools.scripts.flow import Flow
from slime_ext.tools.scripts.loops import Loops
from slime_ext.tools.scripts.pieces import Kind, RefusedError
from slime_ext.tools.scripts.state import Held, State, merged_states
from slime_ext.tools.scripts.values import (
    Unknown,
    Value,
    Words,
    known,
    value,
)
from slime_ext.tools.scripts.variables import Variables

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

MOST = 20_000  # commands that a reading follows
DEEPEST = 60  # functions, sourced files and substitutions inside one another


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
        checkout: the host's, which a sourced ``/…/slime/FILE`` that is not here is taken from, with a note.
    """

    def __init__(
        self, script: str, given: Sequence[str], folders: Sequence[Path], checkout: Path | None = None
    ) -> None:
        self.checkout = checkout
        self.notes: list[str] = []
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
        self.expand, self.variables = Expansion(self), Variables(self)
        self.tests, loops = Tests(self), Loops(self)
        self.follows: dict[str, Callable[[Node], Flow]] = {
            "variable_assignment": self.variables.follow,
            "declaration_command": self.variables.declare,
            "unset_command": self.variables.unset,
            "test_command": self.tests.follow,
            "for_statement": loops.of_words,
            "c_style_for_statement": loops.of_sums,
            "while_statement": loops.of_tests,
            "compound_statement": self._group,
            "do_group": self._group,
            "subshell": self._subshell,
            "list": self._list,
            "negated_command": self._negated,
            "if_statement": self._if,
            "case_statement": self._case_of,
            "function_definition": self._define,
            "command": lambda node: self._redirected(node, []),
            "redirected_statement": self._redirected_statement,
            "pipeline": lambda node: self.apart(lambda: self._piped(node)),
            "ERROR": self._broken,
        }

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
        follow = self.follows.get(node.type)
        if follow is None:
            return self.block(node.children) if node.named_child_count else Flow.NEXT
        flow = follow(node)
        fails = self.state.status not in (0, None) and flow is Flow.NEXT and not self.asking
        if fails and self.state.stops_at_errors and node.type in ("command", "test_command", "subshell"):
            return Flow.EXIT
        return flow

    def _broken(self, node: Node) -> Flow:
        return self.block(
            [
                n
                for n in node.children
                if n.type
                in (
                    "command",
                    "variable_assignment",
                    "declaration_command",
                    "if_statement",
                    "list",
                    "pipeline",
                    "redirected_statement",
                )
            ]
        )

    def _group(self, node: Node) -> Flow:
        if node.children and node.children[0].type == "((":
            found = self.expand.number(node.children, node.start_byte + 2, node.end_byte - 2)
            self.state.status = None if found is None else int(found == 0)
            return Flow.NEXT
        return self.block(node.children)

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
        return self.either(lambda: self.run(right), lambda: Flow.NEXT, self.why(left))

    def why(self, node: Node) -> Unknown:
        text = " ".join(self.source(node).split())
        return Unknown(
            text if len(text) <= 60 else f"{text[:57]}...",
            f"{Path(self.file).name}:{self.offset + node.start_point[0] + 1}",
        )

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Where a command's failure is an answer and ends nothing."""
        self.asking += 1
        try:
            yield
        finally:
            self.asking -= 1

    def _negated(self, node: Node) -> Flow:
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

    def _if(self, node: Node) -> Flow:
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
            why = self.why(next((n for n in test if n.is_named), test[0]))
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

    def _case_of(self, node: Node) -> Flow:
        subject = self.expand.text(node.child_by_field_name("value"))
        items = [child for child in node.children if child.type == "case_item"]
        return self._case(known(subject), items, self.why(node))

    def _case(self, text: str | None, items: Sequence[Node], why: Unknown) -> Flow:
        if not items:
            return Flow.NEXT
        patterns = items[0].children_by_field_name("value")
        close = next(i for i, n in enumerate(items[0].children) if n.type == ")")
        body = [n for n in items[0].children[close + 1 :] if n.type not in (";;", ";&", ";;&")]
        regexes = [self.expand.pattern([n], n.start_byte, n.end_byte) for n in patterns]
        if ".*" in regexes or (
            text is not None and any(r is not None and re.fullmatch(r, text, re.DOTALL) for r in regexes)
        ):
            return self.block(body)
        if text is None or None in regexes:
            return self.either(lambda: self.block(body), lambda: self._case(text, items[1:], why), why)
        return self._case(text, items[1:], why)

    # loops

    # functions

    def _define(self, node: Node) -> Flow:
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

    # tests

    def path_of(self, name: Value) -> Path | None:
        """The file that a path means where the script runs; None where that is unknown."""
        text, folder = known(name), known(self.state.folder)
        if not text:
            return None
        if Path(text).is_absolute() or folder is not None:
            return Path(folder or "/", text)
        return next((root / text for root in self.folders if (root / text).exists()), self.folders[-1] / text)

    def in_checkout(self, name: str) -> Path | None:
        """A file of the host's checkout in place of one that the script has in its container."""
        parts = Path(name).parts
        at = next((i for i in range(len(parts), 0, -1) if parts[i - 1] in ("slime", "miles")), 0)
        found = self.checkout.joinpath(*parts[at:]) if self.checkout and at else None
        if found is None or not found.is_file():
            return None
        self.notes.append(f"{self.place}: {name} is not here; {found} is read in its place")
        return found

    # commands

    def _redirected_statement(self, node: Node) -> Flow:
        body = node.child_by_field_name("body")
        redirects = node.children_by_field_name("redirect")
        if body is None:
            self.state.status = 0
            return Flow.NEXT
        return self._with_output(
            redirects, lambda: self._redirected(body, redirects) if body.type == "command" else self.run(body)
        )

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
        return sign in (">", ">>", "&>", "&>>", ">|", ">&") and (
            descriptor is None or self.source(descriptor) == "1"
        )

    def _redirected(self, node: Node, redirects: Sequence[Node]) -> Flow:
        inner = [
            child
            for child in node.children
            if child.type in ("file_redirect", "herestring_redirect", "heredoc_redirect")
        ]
        if inner and not redirects:
            return self._with_output(inner, lambda: self._simple(node, inner))
        return self._simple(node, [*redirects, *inner])

    def _simple(self, node: Node, redirects: Sequence[Node]) -> Flow:
        name = node.child_by_field_name("name")
        assigned = [c for c in node.children if c.type == "variable_assignment"]
        if name is None:
            return self.block(assigned)
        arguments = node.children_by_field_name("argument")
        try:
            words = [w for w in self.expand.words([*name.children, *arguments]) if not _is_nothing(w)]
        except RefusedError:
            self.state.status = 1
            return Flow.NEXT
        if any(self.source(n).strip().startswith("${") and "[@]" in self.source(n) for n in name.children):
            self.lost.append(f"{self.place_of(name)}\0{self.source(name).strip()}")
        return commands.follow(
            self,
            words,
            [self.variables.assignment(a) for a in assigned],
            self._standard_input(redirects),
            node,
        )

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


def _is_nothing(word: Value) -> bool:
    return bool(word) and all(isinstance(part, Unknown) and part.unset and part.many for part in word)


def _errors(node: Node) -> Iterator[Node]:
    if node.type == "ERROR" or node.is_missing:
        yield node
    for child in node.children:
        if child.has_error or child.is_missing:
            yield from _errors(child)

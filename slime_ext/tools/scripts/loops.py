"""Loops of a shell, of a known number of rounds and of an unknown one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slime_ext.tools.scripts.flow import Flow
from slime_ext.tools.scripts.state import Array, merged_states
from slime_ext.tools.scripts.values import Unknown, Value

if TYPE_CHECKING:
    from tree_sitter import Node

    from slime_ext.tools.scripts.shell import Shell

ROUNDS = 1_000  # of a loop
UNSURE_ROUNDS = 4  # of one whose number of rounds is unknown


class Loops:
    """Follows the loops of a shell."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    def of_words(self, node: Node) -> Flow:
        name = self.shell.source(node.child_by_field_name("variable"))
        values = node.children_by_field_name("value")
        has_in = any(child.type == "in" for child in node.children)
        words = self.shell.expand.words(values) if has_in else list(self.shell.state.positional)
        body = node.child_by_field_name("body")
        is_select = node.children[0].type == "select"
        if is_select or any(
            w and any(isinstance(p, Unknown) and p.many and not p.unset for p in w) for w in words
        ):

            def enter() -> Flow:
                self.shell.variables.assign(name, (Unknown(f"${name}", self.shell.place),))
                return self.shell.run(body)

            return self._unsure(enter, self.shell.why(node))

        rounds = iter(
            [w for w in words if not (w and all(isinstance(p, Unknown) and p.unset and p.many for p in w))]
        )

        def begins() -> bool:
            word = next(rounds, None)
            if word is not None:
                self.shell.variables.assign(name, word)
            return word is not None

        return self._rounds(begins, lambda: self.shell.run(body), node)

    def of_sums(self, node: Node) -> Flow:
        part = node.child_by_field_name
        first, test, step, body = part("initializer"), part("condition"), part("update"), part("body")
        number = lambda n: 1 if n is None else self.shell.expand.number([n], n.start_byte, n.end_byte)  # noqa: E731
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
        return self._rounds(begins, lambda: self.shell.run(body), node)

    def of_tests(self, node: Node) -> Flow:
        test = node.children_by_field_name("condition")
        wanted = node.children[0].type == "while"
        body = node.child_by_field_name("body")

        def begins() -> bool | None:
            with self.shell.asked():
                self.shell.block(test)
            status = self.shell.state.status
            return None if status is None else (status == 0) is wanted

        return self._rounds(begins, lambda: self.shell.run(body), node)

    def _rounds(self, begins: Callable[[], bool | None], body: Callable[[], Flow], node: Node) -> Flow:
        """A loop whose number of rounds is known as long as ``begins`` knows whether one more begins."""
        why, left = self.shell.why(node), len(self.shell.left)
        flow = Flow.NEXT
        for _ in range(ROUNDS):
            goes = begins()
            if not goes:
                break
            before = self.shell.state.copied()
            flow = self._body(body, left, why)
            if flow is not Flow.NEXT:
                break
            if node.type == "while_statement" and self.shell.state.same_as(before):
                return self._joined(Flow.EXIT, left, why)  # it never ends by itself
        else:
            goes = None
        if goes is None:
            flow = self._unsure(body, why)
        return self._joined(Flow.NEXT if flow in (Flow.BREAK, Flow.CONTINUE) else flow, left, why)

    def _body(self, body: Callable[[], Flow], left: int, why: Unknown) -> Flow:
        flow = body()
        for how, state in [pair for pair in self.shell.left[left:] if pair[0] is Flow.CONTINUE]:
            self.shell.left.remove((how, state))
            self.shell.state = merged_states(self.shell.state, state, why) if flow is Flow.NEXT else state
            flow = Flow.NEXT
        return Flow.NEXT if flow is Flow.CONTINUE else flow

    def _joined(self, flow: Flow, left: int, why: Unknown) -> Flow:
        """The flow behind a loop, with the states that left it by ``break`` merged in."""
        for how, state in [pair for pair in self.shell.left[left:] if pair[0] is Flow.BREAK]:
            self.shell.left.remove((how, state))
            self.shell.state = merged_states(self.shell.state, state, why) if flow is Flow.NEXT else state
            flow = Flow.NEXT
        return flow

    def _unsure(self, body: Callable[[], Flow], why: Unknown) -> Flow:
        """A loop of an unknown number of rounds, none among them."""
        left = len(self.shell.left)
        for _ in range(UNSURE_ROUNDS):
            before = self.shell.state.copied()
            flow = self._body(body, left, why)
            after = self.shell.state
            if flow is Flow.EXIT:
                self.shell.state = before
                self.shell.state.started = {**after.started, **before.started}
                break
            self.shell.state = merged_states(before, after, why)
            if self.shell.state.same_as(before):
                break
        else:
            for name in [n for n, h in self.shell.state.variables.items() if h != before.variables.get(n)]:
                is_array = isinstance(self.shell.state.variables[name], Array)
                gap: Value = (Unknown(f"${name}", why.where, many=True, flags=None),)
                self.shell.state.variables[name] = Array({0: gap}) if is_array else gap
        return self._joined(Flow.NEXT, left, why)

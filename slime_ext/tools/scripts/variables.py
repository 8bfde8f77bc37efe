"""Variables of a shell: what they hold, and what assignments make of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime_ext.tools.scripts.flow import Flow
from slime_ext.tools.scripts.pieces import touching
from slime_ext.tools.scripts.state import Array, Held, Reference
from slime_ext.tools.scripts.values import Unknown, Value, Words, collapsed, joined, known, value

if TYPE_CHECKING:
    from tree_sitter import Node

    from slime_ext.tools.scripts.shell import Shell


class Variables:
    """The variables in the state of a shell."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell

    def held(self, name: str) -> Held | None:
        """What a variable holds."""
        return self.shell.state.variables.get(self.shell.state.resolved_name(name))

    def nothing(self, name: str) -> Value:
        """What a variable that nothing has set expands to."""
        if self.shell.state.unread:
            text = f"${name} ({self.shell.state.unread.text} is not here)"
            return (Unknown(text, self.shell.state.unread.where, many=True, flags=None),)
        if self.shell.state.stops_at_unset:
            self.shell.needs.setdefault(name, self.shell.place)
            return (Unknown(f"${name}", self.shell.place, many=True, flags=None, is_text=True),)
        return (Unknown(f"${name}", self.shell.place, unset=True, many=True),)

    def scalar(self, name: str) -> Value:
        """A variable's value; of an array its first element."""
        if name == "PWD":
            return self.shell.state.folder
        if name in ("BASH_SOURCE", "0"):
            return value(str(Path(self.shell.file).absolute()))
        found = self.held(name)
        if isinstance(found, Array):
            self.shell.read.add(name)
            first = found.elements.get(0)
            return first if first is not None and found.is_exact else self._of_array(name, found)
        return self.nothing(name) if not isinstance(found, tuple) else found

    def _of_array(self, name: str, found: Array) -> Value:
        return () if found.is_exact else (Unknown(f"${name}", self.shell.place),)

    def element(self, name: str, index: str) -> Value:
        """An element of an array."""
        if name == "BASH_SOURCE":
            return self.scalar(name)
        found = self.held(name)
        self.shell.read.add(self.shell.state.resolved_name(name))
        if isinstance(found, Array) and found.by_key:
            return found.elements.get(index, self.nothing(f"{name}[{index}]"))
        number = self.shell.expand.computed(index)
        whole = found if isinstance(found, Array) else Array({0: found} if isinstance(found, tuple) else {})
        if number is None or not whole.is_exact:
            return (Unknown(f"${{{name}[{index}]}}", self.shell.place),)
        keys = list(whole.elements)
        if number < 0 and keys:
            number += int(keys[-1]) + 1
        return whole.elements.get(number, self.nothing(f"{name}[{index}]"))

    def array_words(self, name: str) -> Words:
        """The elements of an array, of a scalar its value."""
        if name == "BASH_SOURCE":
            return [self.scalar(name)]
        found = self.held(name)
        self.shell.read.add(self.shell.state.resolved_name(name))
        if found is None:
            return [self.nothing(name)] if self.shell.state.unread else []
        if isinstance(found, Array):
            if found.by_key and len(found.elements) > 1:
                return [(Unknown(f"${{{name}[@]}}", self.shell.place, many=True, flags=None),)]
            return found.words
        return [found] if isinstance(found, tuple) else []

    def assign(self, name: str, held: Held) -> None:
        """Sets a variable, or what it stands for."""
        self.shell.state.variables[self.shell.state.resolved_name(name)] = held

    def follow(self, node: Node) -> Flow:
        self.shell.state.status = 0
        name, held = self.assignment(node)
        self.assign(name, held)
        return Flow.NEXT

    def assignment(self, node: Node, *, by_key: bool = False) -> tuple[str, Held]:
        """A variable and what an assignment makes of it."""
        left, right = node.child_by_field_name("name"), node.child_by_field_name("value")
        adds = any(child.type == "+=" for child in node.children)
        if left.type == "subscript":
            return self._element_assignment(left, right, adds=adds)
        name = self.shell.source(left)
        before = self.held(name)
        if right is not None and right.type == "array":
            found = self._array(
                right,
                before if isinstance(before, Array) and (adds or before.by_key) else Array(by_key=by_key),
                adds=adds,
            )
            if adds and isinstance(before, tuple):
                found = Array({0: before}).with_words(found.words)
            self.shell.words += found.words
            return name, found
        found_text = self.shell.expand.text(right)
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
            self.shell.words += [value(word) for word in said.split()]

    def _array(self, node: Node, before: Array, *, adds: bool) -> Array:
        found = before if adds else Array(by_key=before.by_key)
        for child, *others in touching(node.named_children):
            if child.type == "variable_assignment":
                left = child.child_by_field_name("name")
                found = self._put(
                    found,
                    self.shell.expand.parameters.subscript(left.child_by_field_name("index")),
                    self.shell.expand.text(child.child_by_field_name("value")),
                )
                continue
            keyed = self.shell.source(child)
            if child.type == "concatenation" and keyed.startswith("[") and "]=" in keyed:
                text = known(self.shell.expand.text(child)) or ""
                key, _, said = text[1:].partition("]=")
                found = self._put(found, key, value(said) if text else (Unknown(keyed, self.shell.place),))
            elif child.type != "comment":
                found = found.with_words(self.shell.expand.fields([child, *others]))
        return (
            Array(dict(enumerate(collapsed(found.words)))) if not (found.is_exact or found.by_key) else found
        )

    def _put(self, array: Array, index: str, word: Value) -> Array:
        if array.by_key:
            return array.with_element(index, word)
        number = self.shell.expand.computed(index)
        if number is None or not array.is_exact:
            return Array({0: (Unknown(f"[{index}]", self.shell.place, many=True, flags=None),)})
        if number < 0 and array.elements:
            number += int(list(array.elements)[-1]) + 1
        return array.with_element(number, word)

    def _element_assignment(self, left: Node, right: Node | None, *, adds: bool) -> tuple[str, Held]:
        name = self.shell.source(left.child_by_field_name("name"))
        index = self.shell.expand.parameters.subscript(left.child_by_field_name("index"))
        before = self.held(name)
        array = (
            before if isinstance(before, Array) else Array({0: before} if isinstance(before, tuple) else {})
        )
        word = self.shell.expand.text(right)
        if adds:
            old = self.element(name, index)
            word = joined(() if known(old) == "" else old, word)
        self.shell.words.append(word)
        return name, self._put(array, index, word)

    def declare(self, node: Node) -> Flow:
        kind = self.shell.source(node.children[0])
        flags = "".join(
            self.shell.source(c)
            for c in node.named_children
            if c.type == "word" and self.shell.source(c).startswith("-")
        )
        for child in node.named_children:
            is_name = child.type == "variable_name" or (
                child.type == "word" and not self.shell.source(child).startswith("-")
            )
            if child.type == "variable_assignment":
                name, held = self.assignment(child, by_key="A" in flags)
            elif is_name:
                name, held = self.shell.source(child), self.held(self.shell.source(child))
            else:
                continue
            self._declared(kind, flags, name, held)
        self.shell.state.status = 0
        return Flow.NEXT

    def _declared(self, kind: str, flags: str, name: str, held: Held | None) -> None:
        state = self.shell.state
        is_local = kind == "local" or (kind in ("declare", "typeset") and "g" not in flags)
        if is_local and state.locals:
            state.locals[-1].setdefault(name, state.variables.pop(name, None))
        if "n" in flags and kind != "export" and isinstance(held, tuple):
            state.variables[name] = Reference(known(held) or "")
        elif held is None and ("a" in flags or "A" in flags):
            state.variables[name] = Array(by_key="A" in flags)
        elif held is not None and not (is_local and held is None):
            if "i" in flags and isinstance(held, tuple) and (text := known(held)) is not None:
                number = self.shell.expand.computed(text)
                held = value(str(number)) if number is not None else held
            self.assign(name, held)
        if kind == "export" or "x" in flags:
            state.exported |= {name}

    def unset(self, node: Node) -> Flow:
        for child in node.named_children:
            text = known(self.shell.expand.text(child)) or ""
            name, _, index = text.rstrip("]").partition("[")
            if text.startswith("-"):
                continue
            if not index:
                self.shell.state.variables.pop(self.shell.state.resolved_name(name), None)
                self.shell.state.functions.pop(name, None)
            elif isinstance(held := self.held(name), Array):
                key: int | str | None = index if held.by_key else self.shell.expand.computed(index)
                self.assign(
                    name, Array({k: v for k, v in held.elements.items() if k != key}, by_key=held.by_key)
                )
        self.shell.state.status = 0
        return Flow.NEXT

"""What a command of a script does to its shell: builtins, functions, texts that are evaluated, launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slime_ext.tools.scripts.builtins import BUILTINS
from slime_ext.tools.scripts.flow import Flow
from slime_ext.tools.scripts.starts import SHELLS, evaluate_text, follow_external
from slime_ext.tools.scripts.state import Held
from slime_ext.tools.scripts.values import Unknown, Value, Words, known

if TYPE_CHECKING:
    from tree_sitter import Node

    from slime_ext.tools.scripts.shell import Shell


SUCCEEDS = tuple(
    "sleep mkdir rm touch date cp chmod wait ulimit shopt trap alias set ray pkill umask unalias clear "
    "sync".split()
)


def follow(
    shell: Shell, words: Words, assigned: Sequence[tuple[str, Held]], stdin: Value | None, node: Node
) -> Flow:
    """Follows a command with its words expanded.

    Args:
        assigned: variables that it sets for itself alone.
        stdin: what it reads, where that is in the script.
    """
    state = shell.state
    if not words:
        for name, held in assigned:
            shell.variables.assign(name, held)
        return Flow.NEXT
    name = known(words[0])
    if name not in ("echo", "printf"):
        shell.words += words
        shell.commands.append(words)
    if name in state.functions:
        return _with_variables(shell, assigned, lambda: shell.call(name, words[1:]))
    handler = BUILTINS.get(name or "")
    if handler:
        return _with_variables(shell, assigned, lambda: handler(shell, words, stdin) or Flow.NEXT)
    is_launch = follow_external(shell, words, assigned, stdin)
    if not is_launch:
        text = " ".join(shell.source(node).split())
        state.out.append((Unknown(text, shell.place, many=True, flags=None),))
        state.status = 0 if name in SUCCEEDS else None
    return Flow.EXIT if name == "exec" and len(words) > 1 else Flow.NEXT


def _with_variables(
    shell: Shell, assigned: Sequence[tuple[str, Held]], follow_it: Callable[[], Flow]
) -> Flow:
    before = {name: shell.state.variables.get(name) for name, _ in assigned}
    for name, held in assigned:
        shell.state.variables[name] = held
    flow = follow_it()
    for name, held in before.items():
        if held is None:
            shell.state.variables.pop(name, None)
        else:
            shell.state.variables[name] = held
    return flow


def follow_piped(shell: Shell, node: Node, given: Value | None) -> None:
    """A command of a pipeline, which reads what the one before it writes."""
    named = node.child_by_field_name("name") if node.type == "command" else None
    words = shell.expand.words([*named.children, *node.children_by_field_name("argument")]) if named else []
    name = known(words[0]) if words else None
    if name in SHELLS and len(words) == 1:
        evaluate_text(shell, given or ())
    elif name in ("cat", "tee"):
        shell.state.out = [given or ()]
    else:
        shell.apart(lambda: shell.run(node))

"""Commands that start train.py, or a shell that does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_ext.config.files import text_of
from slime_ext.tools.scripts.state import Held, Started
from slime_ext.tools.scripts.values import Unknown, Value, Words, known, shown, value

if TYPE_CHECKING:
    from slime_ext.tools.scripts.shell import Shell

PROGRAMS = ("train.py", "train_async.py")
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
# What only names train.py, to look at it or to end it.
NO_LAUNCH = tuple(
    "echo printf pkill pgrep kill grep egrep rg cat less more head tail sed awk ls find cp mv rm ln touch "
    "chmod mkdir tee diff wc test [ stat which type file git vim nano scp rsync wget curl trap alias".split()
)


def follow_external(
    shell: Shell, words: Words, assigned: Sequence[tuple[str, Held]], stdin: Value | None
) -> bool:
    """Follows a command that is no builtin; whether it was a launch or a shell."""
    names = [known(word) for word in words]
    first = Path(names[0] or "").name
    if first in NO_LAUNCH:
        return False
    environment = _of_command(words, names, assigned)
    at = next((i for i, name in enumerate(names) if name and Path(name).name in PROGRAMS), None)
    inner = _shell_text(words, names)
    if at is not None and (inner is None or at < inner[0]):
        exported = _exported(shell) if "ray" not in names else {}
        _start(shell, names[at] or "", words[at + 1 :], exported | environment)
        return True
    if inner is not None:
        before = dict(shell.state.variables)
        for name, text in environment.items():
            shell.state.variables[name] = value(text)
            shell.state.exported |= {name}
        evaluate_text(shell, inner[1], inner[2])
        shell.state.variables = before
        return True
    if first in SHELLS and len(words) == 1 and stdin is not None:
        evaluate_text(shell, stdin)
        return True
    script = next((n for n in names[1:] if n and not n.startswith("-")), None) if first in SHELLS else None
    if script:
        _other_script(shell, script, words[names.index(script) + 1 :])
        return True
    return False


def _shell_text(words: Words, names: Sequence[str | None]) -> tuple[int, Value, Words] | None:
    """Where a command gives a text to a shell (``bash -c TEXT ARGS``, ``ssh HOST TEXT``), and that text."""
    for i, name in enumerate(names):
        option = names[i + 1] if i + 1 < len(names) else None
        if (
            name
            and Path(name).name in SHELLS
            and option
            and re.fullmatch(r"-[a-z]*c", option)
            and i + 2 < len(words)
        ):
            return i, words[i + 2], words[i + 3 :]
    if names[0] == "ssh":
        rest = [i for i in range(1, len(names)) if _is_operand(names, i)]
        if len(rest) > 1:
            text = [part for word in words[rest[1] :] for part in (*word, " ")]
            return rest[1], value(*text), []
    return None


def _is_operand(names: Sequence[str | None], i: int) -> bool:
    before = names[i - 1] or ""
    takes = re.fullmatch(r"-[bcDEeFIiJLlmOopQRSWw]", before) is not None
    return not (names[i] or "x").startswith("-") and not takes


def evaluate_text(shell: Shell, text: Value, given: Words | None = None) -> None:
    said = known(text)
    if said is None:
        cannot_follow(shell, text)
        shell.state.status = None
        return
    before, zero = shell.state.positional, shell.zero
    shell.zero, shell.state.positional = (given[0], given[1:]) if given else (zero, [])
    shell.apart(lambda: shell.evaluate(said, first_line=max(shell.line - 1, 0)))
    shell.zero, shell.state.positional = zero, before


def cannot_follow(shell: Shell, text: Value) -> None:
    """Notes a text that is run though it is not known; one that names train.py is a launch."""
    match = re.search(r"(\S*\btrain(?:_async)?\.py)\b", shown(text))
    if match:
        gap = (Unknown(shown(text)[:60], shell.place, many=True, flags=None),)
        _start(shell, match[1], [gap], {})


def _other_script(shell: Shell, name: str, words: Words) -> None:
    """Another script of the same folder, which a shell of its own runs."""
    path = shell.path_of(value(name))
    shell.state.status = None
    if (
        path is None
        or not path.is_file()
        or not re.search(r"\btrain(_async)?\.py", text := text_of(str(path)))
    ):
        return
    before = shell.state.positional
    shell.state.positional = words
    shell.apart(lambda: shell.follow(str(path), text))
    shell.state.positional = before


def _start(shell: Shell, program: str, words: Words, environment: dict[str, str]) -> None:
    state = shell.state
    key = f"{shell.file}:{shell.line}"
    state.started.pop(key, None)
    state.started[key] = Started(program, tuple(words), tuple(environment.items()), state.folder, shell.place)
    state.status = 0  # what follows behind || is for a launch that fails


def _exported(shell: Shell) -> dict[str, str]:
    import os

    said = {name: shell.variables.held(name) for name in sorted(shell.state.exported)}
    found = {
        name: shown(held)
        for name, held in said.items()
        if isinstance(held, tuple) and known(held) is not None
    }
    return {name: text for name, text in found.items() if os.environ.get(name) != text}


def _of_command(
    words: Words, names: Sequence[str | None], assigned: Sequence[tuple[str, Held]]
) -> dict[str, str]:
    """Variables that a command gives to what it starts."""
    found = {name: shown(held) for name, held in assigned if isinstance(held, tuple)}
    for i, word in enumerate(words):
        name = names[i] if names[i] is not None else shown(word)
        if (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", name, re.DOTALL)) and "env" in names[:i]:
            found[match[1]] = match[2]
        elif name == "--runtime-env-json" and i + 1 < len(words):
            found |= runtime_variables(words[i + 1])
        elif name.startswith("--runtime-env-json="):
            found |= runtime_variables(value(*_without(word, "--runtime-env-json=")))
    return found


def _without(word: Value, prefix: str) -> Value:
    return value(str(word[0]).removeprefix(prefix), *word[1:])


def runtime_variables(text: Value) -> dict[str, str]:
    """``env_vars`` of a Ray job's environment; unknown parts as the script writes them."""
    import json

    unknown = [part for part in text if isinstance(part, Unknown)]
    plain = "".join(part if isinstance(part, str) else f"\x00{unknown.index(part)}\x00" for part in text)
    try:
        found = json.loads(plain, strict=False).get("env_vars", {})
    except (ValueError, AttributeError):
        return {}
    put = lambda said: re.sub("\x00(\\d+)\x00", lambda m: unknown[int(m[1])].text, said)  # noqa: E731
    return {put(str(name)): put(str(said)) for name, said in found.items()}

"""bash's own commands, and those of other programs that only turn text into text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slime_ext.config.files import text_of
from slime_ext.tools.scripts.conditions import Term
from slime_ext.tools.scripts.flow import Flow
from slime_ext.tools.scripts.starts import cannot_follow, follow_external
from slime_ext.tools.scripts.state import Array, merged_states
from slime_ext.tools.scripts.values import Unknown, Value, Words, is_many, known, shown, value

if TYPE_CHECKING:
    from slime_ext.tools.scripts.shell import Shell

NO_SETTINGS = re.compile(
    r"(^|/)(activate|conda\.sh|\.?bashrc|\.?profile|\.?bash_profile|\.?zshrc|setvars\.sh|set_env\.sh)$"
)
Handler = Callable[["Shell", Words, "Value | None"], "Flow | None"]


def _done(status: int | None) -> Handler:
    def handler(shell: Shell, words: Words, stdin: Value | None) -> None:
        shell.state.status = status

    return handler


def _echo(shell: Shell, words: Words, stdin: Value | None) -> None:
    words = list(words[1:])
    ends, escapes = True, False
    while words and re.fullmatch(r"-[neE]+", known(words[0]) or ""):
        flag = known(words.pop(0)) or ""
        ends, escapes = ends and "n" not in flag, escapes or "e" in flag
    parts = [part for i, word in enumerate(words) for part in ((" ", *word) if i else word)]
    if escapes:
        parts = [_unescaped(part) if isinstance(part, str) else part for part in parts]
    shell.state.out.append(value(*parts, *(["\n"] if ends else [])))
    shell.state.status = 0


def _unescaped(text: str) -> str:
    table = {"n": "\n", "t": "\t", "\\": "\\", "r": "\r", "a": "\a"}
    return re.sub(r"\\([nt\\ra])", lambda m: table[m[1]], text)


def _printf(shell: Shell, words: Words, stdin: Value | None) -> None:
    shell.state.status = 0
    words = list(words[1:])
    into = ""
    if len(words) > 2 and known(words[0]) == "-v":
        into, words = known(words[1]) or "", words[2:]
    if words and known(words[0]) == "--":
        words = words[1:]
    form = known(words[0]) if words else None
    found = _formatted(form, words[1:]) if form is not None and not any(map(is_many, words)) else None
    if found is None:
        found = (
            Unknown(f"$(printf {shown(words[0]) if words else ''} …)", shell.place, many=True, flags=None),
        )
    if into:
        shell.variables.assign(into, found)
    else:
        shell.state.out.append(found)


def _formatted(form: str, words: Words) -> Value | None:
    form = _unescaped(form)
    places = re.findall(r"%(?:%|[-0-9.]*[sdibqf])", form)
    if any(p not in ("%s", "%d", "%i", "%%") for p in places):
        return None
    count = sum(p != "%%" for p in places)
    rounds = [words[i : i + count] for i in range(0, len(words), count)] if count and words else [[]]
    parts: list[str | Unknown] = []
    for given in rounds:
        left = list(given)
        for piece in re.split(r"(%%|%[sdi])", form):
            if piece == "%%":
                parts.append("%")
            elif re.fullmatch(r"%[sdi]", piece):
                parts += left.pop(0) if left else (() if piece == "%s" else ("0",))
            else:
                parts.append(piece)
    return value(*parts)


def _pwd(shell: Shell, words: Words, stdin: Value | None) -> None:
    shell.state.out.append(value(*shell.state.folder, "\n"))
    shell.state.status = 0


def _dirname(shell: Shell, words: Words, stdin: Value | None) -> None:
    _of_path(shell, words, lambda text: str(Path(text).parent) if text.strip("/") else "/")


def _basename(shell: Shell, words: Words, stdin: Value | None) -> None:
    given = [w for w in words[1:] if known(w) != "--"]
    suffix = known(given[1]) if len(given) > 1 else ""
    if suffix is None:
        given = [(Unknown("$(basename …)", shell.place),)]
    _of_path(shell, [words[0], *given[:1]], lambda text: _base(text, suffix or ""))


def _base(text: str, suffix: str) -> str:
    name = text.rstrip("/").rpartition("/")[2] or "/"
    return name.removesuffix(suffix) if name != suffix else name


def _of_path(shell: Shell, words: Words, change: Callable[[str], str]) -> None:
    given = [w for w in words[1:] if known(w) != "--"]
    text = known(given[0]) if given else None
    name = known(words[0])
    found = (
        value(change(text))
        if text is not None
        else (Unknown(f"$({name} {shown(given[0]) if given else ''})", shell.place),)
    )
    shell.state.out.append(value(*found, "\n"))
    shell.state.status = 0


def _cd(shell: Shell, words: Words, stdin: Value | None) -> None:
    given = [w for w in words[1:] if not (known(w) or "x").startswith("-")]
    aim = given[0] if given else shell.variables.scalar("HOME")
    text, here = known(aim), known(shell.state.folder)
    if text is None or (known(words[-1]) == "-"):
        shell.state.folder = (Unknown(f"$(cd {shown(aim)} && pwd)", shell.place),)
    elif Path(text).is_absolute() or here is not None:
        shell.state.folder = value(_normal(f"{here or ''}/{text}" if not Path(text).is_absolute() else text))
    elif text not in ("", "."):
        shell.state.folder = (
            (*shell.state.folder, f"/{text}")
            if all(isinstance(p, Unknown) for p in shell.state.folder)
            else value(*shell.state.folder, f"/{text}")
        )
    shell.state.status = 0


def _normal(path: str) -> str:
    import os

    return "/" + os.path.normpath(path).lstrip("/")


def _test(shell: Shell, words: Words, stdin: Value | None) -> None:
    given = words[1:-1] if known(words[0]) == "[" else words[1:]
    shell.tests.judge([Term(word) for word in given])


def _set(shell: Shell, words: Words, stdin: Value | None) -> None:
    said = [known(word) for word in words]
    shell.state.status = 0
    for i, word in enumerate(said[1:], 1):
        if word == "--":
            shell.state.positional = list(words[i + 1 :])
            return
        if word and re.fullmatch(r"[-+][a-zA-Z]*e[a-zA-Z]*", word):
            shell.state.stops_at_errors = word[0] == "-"
        if word and re.fullmatch(r"[-+][a-zA-Z]*u[a-zA-Z]*", word):
            shell.state.stops_at_unset = word[0] == "-"
        if word in ("errexit", "nounset"):
            name = {"errexit": "stops_at_errors", "nounset": "stops_at_unset"}[word]
            setattr(shell.state, name, (said[i - 1] or "").startswith("-"))
        if word is None or (not word.startswith(("-", "+")) and not (said[i - 1] or "").endswith("o")):
            shell.state.positional = list(words[i:])
            return


def _shift(shell: Shell, words: Words, stdin: Value | None) -> None:
    text = known(words[1]) if len(words) > 1 else "1"
    left = shell.state.positional
    if text is None or not text.isdigit() or any(map(is_many, left[: int(text)])):
        shell.state.positional = [(Unknown("$@", shell.place, many=True, flags=None),)]
        return
    shell.state.status = int(int(text) > len(left))
    shell.state.positional = left[int(text) :] if int(text) <= len(left) else left


def _eval(shell: Shell, words: Words, stdin: Value | None) -> Flow | None:
    text = value(*(part for i, word in enumerate(words[1:]) for part in ((" ", *word) if i else word)))
    said = known(text)
    if said is not None and not any(map(is_many, words)):
        return shell.evaluate(said, first_line=max(shell.line - 1, 0))
    cannot_follow(shell, text)
    shell.state.status = None
    match = re.match(r"\s*(\w+)(\+?)=\(", shown(text))
    if match:  # an array whose elements are not known
        gap = (Unknown(shown(text)[:60], shell.place, many=True, flags=None),)
        held = shell.variables.held(match[1])
        before = held if match[2] and isinstance(held, Array) else Array()
        shell.variables.assign(match[1], before.with_words([gap]))
    else:
        _may_have_set(shell, f"eval {shown(text)[:60]}")
    return None


def _may_have_set(shell: Shell, what: str) -> None:
    """Notes something unknown that runs in this shell: it can have set any variable that is unset."""
    gap = Unknown(what, shell.place, many=True, flags=None)
    shell.state.unread = shell.state.unread or gap
    shell.unread.append(gap)


def _source(shell: Shell, words: Words, stdin: Value | None) -> Flow | None:
    if len(words) < 2:
        return None
    path, said = shell.path_of(words[1]), shown(words[1])
    shell.state.status = 0
    if NO_SETTINGS.search(said) or said == "/dev/null":
        return None
    if path is None or not path.is_file():
        path = shell.in_checkout(said)
    if path is None:
        shell.state.status = None
        _may_have_set(shell, f"source {said}")
        return None
    before = shell.state.positional
    if words[2:]:
        shell.state.positional = list(words[2:])
    left = len(shell.left)
    flow = shell.follow(str(path), text_of(str(path)))
    for how, state in [pair for pair in shell.left[left:] if pair[0] is Flow.RETURN]:
        shell.left.remove((how, state))
        shell.state = merged_states(shell.state, state, Unknown("return", shell.place))
    shell.state.positional = before
    return Flow.NEXT if flow is Flow.RETURN else flow


def _read(shell: Shell, words: Words, stdin: Value | None) -> None:
    said = [known(word) or "" for word in words[1:]]
    text = known(stdin) if stdin is not None else None
    into_array = any(re.fullmatch(r"-[a-z]*a", word) for word in said)
    names = [word for word in said if re.fullmatch(r"[A-Za-z_]\w*", word)]
    ifs = known(shell.variables.scalar("IFS")) if "IFS" in shell.state.variables else " \t\n"
    gap = (Unknown(f"$(read {' '.join(names)})", shell.place, many=True, flags=None),)
    first = text.split("\n")[0] if text is not None else None
    plain = not any(word.startswith("-") and word not in ("-r", "-a", "-ra", "-ar") for word in said)
    if first is None or ifs is None or not plain:
        for name in names:
            shell.variables.assign(name, Array({0: gap}) if into_array else gap)
        shell.state.status = None
        return
    fields = [f for f in re.split(f"[{re.escape(ifs)}]+", first) if f] if ifs else [first]
    shell.state.status = 0
    if into_array:
        shell.variables.assign(names[-1], Array(dict(enumerate(map(value, fields)))))
        return
    for i, name in enumerate(names):
        last = i + 1 == len(names)
        shell.variables.assign(name, value(" ".join(fields[i:]) if last else "".join(fields[i : i + 1])))


def _mapfile(shell: Shell, words: Words, stdin: Value | None) -> None:
    names = [known(word) or "" for word in words[1:]]
    name = names[-1] if names and re.fullmatch(r"[A-Za-z_]\w*", names[-1]) else "MAPFILE"
    text = known(stdin) if stdin is not None else None
    shell.state.status = 0
    if text is not None and names[:-1] == ["-t"]:
        lines = text.removesuffix("\n").split("\n") if text else []
        shell.variables.assign(name, Array(dict(enumerate(map(value, lines)))))
        return
    shell.variables.assign(
        name, Array({0: (Unknown(f"$(mapfile {name})", shell.place, many=True, flags=None),)})
    )


def _cat(shell: Shell, words: Words, stdin: Value | None) -> None:
    shell.state.status = 0 if len(words) == 1 else None
    found = (
        stdin
        if len(words) == 1 and stdin is not None
        else (Unknown(f"$({' '.join(map(shown, words))})", shell.place, many=True, flags=None),)
    )
    shell.state.out.append(found)


def _seq(shell: Shell, words: Words, stdin: Value | None) -> None:
    said = [known(word) for word in words[1:]]
    shell.state.status = 0
    if all(word is not None and re.fullmatch(r"-?\d+", word) for word in said) and 1 <= len(said) <= 3:
        numbers = [int(word or 0) for word in said]
        first, step, last = {1: (1, 1, numbers[0]), 2: (numbers[0], 1, numbers[-1])}.get(
            len(said), tuple(numbers)
        )
        if step and abs(last - first) // abs(step) < 100_000:
            end = last + (1 if step > 0 else -1)
            shell.state.out.append(value("".join(f"{n}\n" for n in range(first, end, step))))
            return
    shell.state.out.append(
        (Unknown(f"$({' '.join(map(shown, words))})", shell.place, many=True, flags=None),)
    )


def _let(shell: Shell, words: Words, stdin: Value | None) -> None:
    found = [shell.expand.computed(text) if (text := known(word)) is not None else None for word in words[1:]]
    shell.state.status = None if None in found or not found else int(found[-1] == 0)


def _leaves(kind: str) -> Handler:
    def handler(shell: Shell, words: Words, stdin: Value | None) -> Flow:
        text = known(words[1]) if len(words) > 1 else None
        if kind in ("EXIT", "RETURN") and text is not None and text.isdigit():
            shell.state.status = int(text)
        return Flow[kind]

    return handler


def _rest(shell: Shell, words: Words, stdin: Value | None) -> Flow | None:
    """``command X``, ``builtin X``: X itself, unless it only asks."""
    if len(words) > 1 and not (known(words[1]) or "").startswith("-"):
        handler = BUILTINS.get(known(words[1]) or "")
        if handler:
            return handler(shell, words[1:], stdin)
        if not follow_external(shell, words[1:], [], stdin):
            shell.state.status = None
        return None
    shell.state.status = None
    return None


BUILTINS: dict[str, Handler] = {
    **dict.fromkeys((":", "true"), _done(0)),
    "false": _done(1),
    "echo": _echo,
    "printf": _printf,
    "pwd": _pwd,
    "dirname": _dirname,
    "basename": _basename,
    "cd": _cd,
    "test": _test,
    "[": _test,
    "set": _set,
    "shift": _shift,
    "eval": _eval,
    "source": _source,
    ".": _source,
    "read": _read,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    "cat": _cat,
    "seq": _seq,
    "let": _let,
    "exit": _leaves("EXIT"),
    "return": _leaves("RETURN"),
    "break": _leaves("BREAK"),
    "continue": _leaves("CONTINUE"),
    "command": _rest,
    "builtin": _rest,
}

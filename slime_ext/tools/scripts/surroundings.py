"""What a script finds around it: its own files from this disk, stand-ins for what only the cluster has.

Each run shows what the script looks for (a sourced file, a folder, a variable, a command); what is not here
is put there for the next run, as a token or as an empty folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError
from slime_ext.tools.folders import is_file, is_folder
from slime_ext.tools.scripts.trace import BEGIN, COMPLAINT, END, PS4, SHELLS, TOKEN, Answer, Line, Run, World

# bash's own words, and programs of bashkit that only turn text into text or write to its memory
OWN = frozenset(
    "if then elif else fi for do done while until case esac in function select time { } ! [ [[ test : . true "
    "false alias bg break builtin caller cd continue declare dirs disown echo enable eval exec exit export "
    "fg getopts let local logout mapfile popd printf pushd pwd read readarray readonly return set shift "
    "shopt source suspend times trap typeset ulimit umask unalias unset wait basename dirname seq env nohup "
    "bash sh mkdir touch".split()
)
TEXT_TOOLS = frozenset(
    "awk bc cat comm cut egrep expr fgrep fold grep head join jq nl paste realpath rev sed sort tac tail tr "
    "uniq wc".split()
)
PWD = "$(pwd)"
OTHERS = {*SHELLS, *TEXT_TOOLS, "command", "type", "hash", "kill", "tee", "which"} - OWN
NO_SETTINGS = re.compile(
    r"/dev/null|(.*/)?(activate|conda\.sh|\.?bashrc|\.?(bash_)?profile|\.?zshrc|setvars\.sh|set_env\.sh)"
)
LOOKS = re.compile(r"(?:cd|source|\.|bash|sh|'?\[\[?'?|test|\S*/\S*)(?:\s|$)")  # what looks for a file
TEST_OF_FILE = re.compile(r"(?<!\S)-([bcdefghkLprsSuwxO]) +('[^']*'|[^\s'\])]+)")
DECIDES = re.compile(r"(?<!\S)(\[\[?|case|test|for|while|until|if|elif|\(\()(?!\S)|&&|\|\|")
NAMES = re.compile(r"\$([A-Za-z]\w*)|\$\{([A-Za-z]\w*)\}|(?<![\w$])([A-Za-z_]\w*)")
COMMENT = re.compile(r"(^|\s)#.*", re.MULTILINE)


class Surroundings:
    """Files, variables and commands of one script.

    Args:
        path: the script's.
        text: the script, if it is not what the file says.
        roots: folders in which relative paths are looked for.
        checkout: the host's; a sourced ``/…/slime/FILE`` that is not here is read from it, with a note.
    """

    def __init__(self, path: str, text: str | None, roots: Sequence[Path], checkout: Path | None) -> None:
        self.path, self.roots, self.checkout = str(Path(path).absolute()), roots, checkout
        self.files = {path: text_of(path)}  # by the name that messages use
        self.placed: dict[str, str] = {} if text is None else {self.path: text}  # path -> content
        self.names: set[str] = set(OTHERS)  # of commands
        self.texts: dict[str, int] = {}  # of tokens, with their numbers
        self.evaluated: dict[str, None] = {}  # unknown texts that were run: they can set any variable
        self.needs: dict[str, str] = {}  # variables without which bash ends the script -> where
        self.tests: dict[str, str] = {}  # questions after files -> where
        self.notes: list[str] = []
        self._seen: set[Line] = set()
        self.folder = "/" + self.token(PWD)
        self._add(self.path, self.files[path] if text is None else text)

    def size(self) -> int:
        """Grows with everything that a run has shown."""
        return sum(map(len, (self.placed, self.names, self.needs, self.files, self.evaluated)))

    def token(self, text: str) -> str:
        """A word that stands for what only the cluster knows, such as ``$(hostname)``."""
        return f"{BEGIN}{self.texts.setdefault(text, len(self.texts))}{END}"

    def shown(self, text: str) -> str:
        """A text with its tokens as the script writes them."""
        text = text.replace(self.folder, PWD)
        while match := TOKEN.search(text):
            text = text[: match.start()] + list(self.texts)[int(match[1])] + text[match.end() :]
        return text

    def where(self, name: str) -> str:
        """``file:line`` of the last mention of a flag or an unknown word outside comments."""
        name = name.partition(" (")[0].removeprefix("$(").removesuffix(")").lstrip("$")
        mention = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        for path, text in self.files.items():
            lines = enumerate(text.splitlines(), 1)
            if found := [i for i, line in lines if mention.search(line.partition("#")[0])]:
                return f"{Path(path).name}:{found[-1]}"
        return Path(self.path).name

    # variables

    @property
    def text(self) -> str:
        """All files, without comments."""
        return COMMENT.sub(r"\1", "\n".join(self.files.values()))

    def environment(self, world: World) -> dict[str, str]:
        """This process' variables, and tokens for those that the script needs and nothing sets."""
        found = {k: v for k, v in os.environ.items() if k not in ("PWD", "OLDPWD", "BASH_ENV", "ENV")}
        found |= {"PATH": self.token("$PATH"), "PS4": PS4}
        said = dict.fromkeys(["HOSTNAME", *self.needs, *self._unset()], "")
        if self.evaluated:
            said = dict.fromkeys([*said, *self._referenced()], f" ({next(iter(self.evaluated))} is not here)")
        for question in (f"${name}{why}" for name, why in said.items() if name not in os.environ):
            answer = world.get(question, Answer()).output
            name = question[1:].partition(" ")[0]
            found[name] = self.token(question) if answer is None else answer
        return found

    def _referenced(self) -> Iterable[str]:
        return dict.fromkeys(re.findall(r"\$\{?[!#]?([A-Za-z_]\w*)", self.text))

    def _unset(self) -> list[str]:
        """Variables that nothing sets, so that the script expects them from its machine.

        One with a default (``${X:-1}``), in a test or at the head of a loop is as bash has it: unset.
        """
        plain: dict[str, bool] = {}
        for line in self.text.split("\n"):
            decides = DECIDES.search(line) is not None
            for match in NAMES.finditer(line):
                name = match[1] or match[2] or match[3]
                plain[name] = plain.get(name, True) and not decides and match[3] is None
        return [name for name, is_plain in plain.items() if is_plain]

    # files

    def contents(self, world: World) -> dict[str, str]:
        """What is put there: path -> content."""
        said = lambda match: world.get(self.shown(match[0]), Answer(0, match[0])).output or ""  # noqa: E731
        return {f"{self.folder}/.here": ""} | {p: TOKEN.sub(said, text) for p, text in self.placed.items()}

    def learn(self, run: Run) -> None:
        """Puts there what a run looked for in vain."""
        for line in run.lines:
            self._read(line)
            if LOOKS.match(line.text) and line not in self._seen:
                self._seen.add(line)
                self._look(line, line.words or [""])
        run.asked |= dict.fromkeys(self.tests)
        for match in COMPLAINT.finditer(run.trace):
            self._complaint(match[3], f"{Path(match[1]).name}:{match[2]}", run.trace[: match.start()])

    def _look(self, line: Line, words: list[str]) -> None:
        name, last = words[0], words[-1]
        if name in ("source", ".") and words[1:]:
            self._source(line, words[1])
        elif name == "cd" and words[1:] and last[0:1] != "-":
            if not is_folder(path := at(line.folder, last)):
                self.placed.setdefault(f"{path}/.here", "")
        elif name in ("bash", "sh"):
            if script := next((word for word in words[1:] if word[:1] != "-"), None):
                self._copied(line.folder, script)
        elif name in ("[", "[[", "test"):
            self._test(line)
        elif "/" in name and "=" not in name:
            self.names.add(name)

    def _read(self, line: Line) -> None:
        """Learns from a file that the trace names."""
        if line.file and line.file != self.path and line.file not in self.files:
            path = at(line.folder, line.file)
            text = self.placed.get(path) or (text_of(path) if is_file(path) else "")
            self.files[line.file] = text
            self._add(path, text)

    def _add(self, path: str, text: str) -> None:
        forbid_carriage_returns(path, text)
        if (other := self._for_bashkit(text)) != text:
            self.placed[path] = other
        words = re.split(r"[\s\"'$;|&()<>{}=`\\]+", COMMENT.sub("", text))
        names = {word for word in words if re.fullmatch(r"[A-Za-z_./][\w.+/-]*", word)}
        self.names |= names - OWN - {".."}

    def _for_bashkit(self, text: str) -> str:
        """A script without what bashkit 0.20 reads otherwise than bash, or answers itself.

        It joins the words of ``"${A[@]/x/y}"`` and keeps those of an empty ``"${!array}"``: they become
        tokens. Quotes in ``${X:-$(f "y")}`` are letters to it: they go.
        """
        arrays = "|".join(re.findall(r"(\w+)=[\"']?\w+\[@\]", text)) or "(?!)"
        unread = rf'"\$\{{\w+\[@\]/[^}}"]*\}}"|"\$\{{!(?:{arrays})\}}"'
        text = re.sub(unread, lambda match: self.token(match[0]), text)
        text = re.sub(r"\$\{RANDOM\}|\$?\bRANDOM\b", lambda _: self.token("$RANDOM"), text)
        text = re.sub(r"(?<![\w-])(command -[vV]|type -[pPt])(?=\s)", "which", text)
        for match in reversed(list(re.finditer(r"\$\{\w+:?[-=+]", text))):
            end = _closing(text, match.start() + 1)
            said = text[match.end() : end]
            if "$(" in said and '"' in said:
                needs_them = re.search(r"['\\]|echo|printf", said)
                plain = self.token(said) if needs_them else said.replace('"', "")
                text = text[: match.end()] + plain + text[end:]
        return text

    def _source(self, line: Line, name: str) -> None:
        path = at(line.folder, name)
        if path in self.placed or is_file(path) or self._copied(line.folder, name):
            return
        self.placed[path] = ""
        if NO_SETTINGS.fullmatch(name):
            return
        if found := self._in_checkout(name):
            self.placed[path] = text_of(str(found))
            self.notes.append(f"{line.place}: {name} is not here; {found} is read in its place")
            return
        why = f"source {self.shown(name)} is not here"  # it can set what nothing has set before
        said = [f": ${{{name}={self.token(f'${name} ({why})')}}}" for name in self._referenced()]
        self.placed[path] = "\n".join(said)

    def _in_checkout(self, name: str) -> Path | None:
        """A file of the host's checkout in place of one that the script has in its container."""
        parts = Path(name).parts
        at = next((i for i in range(len(parts), 0, -1) if parts[i - 1] in ("slime", "miles")), 0)
        found = self.checkout.joinpath(*parts[at:]) if self.checkout and at else None
        return found if found is not None and is_file(found) else None

    def _copied(self, folder: str, name: str) -> bool:
        """Whether a file named from the folder in which the script begins lies in one of the roots."""
        path = at(folder, name)
        inside = path.removeprefix(self.folder + "/")
        found = next((f for root in self.roots if is_file(f := root / inside)), None)
        if inside == path or found is None:
            return False
        self.placed.setdefault(path, text_of(str(found)))
        return True

    def _test(self, line: Line) -> None:
        """Questions after files that do not lie beside the script."""
        for sign, name in TEST_OF_FILE.findall(line.text):
            path = at(line.folder, name.strip("'"))
            is_near = any(Path(path).is_relative_to(root) for root in self.roots) and Path(path).exists()
            if not is_near and path not in self.placed and name.strip("'"):
                self.tests.setdefault(f"[ -{sign} {path} ]", line.place)

    def _complaint(self, said: str, where: str, before: str) -> None:
        if match := re.fullmatch(r"(\w+): unbound variable", said):
            self.needs.setdefault(match[1], where)
        elif (match := re.match(r"(\w+): ", said)) and re.search(rf"\$\{{{match[1]}:?\?", self.text):
            self.needs.setdefault(match[1], where)  # of ${X:?why}
        elif match := re.fullmatch(r"(.+?): command not found.*", said):
            self.names.add(match[1])
        elif match := re.fullmatch(r"([^:]+): No such file or directory", said):
            last = Run(trace=before).lines[-1:]
            words, folder = (last[0].words, last[0].folder) if last else ([], self.folder)
            if match[1] not in words and not self._copied(folder, match[1]):  # it stands behind <
                self.placed.setdefault(at(folder, match[1]), self.token(f"$(< {self.shown(match[1])})"))


def at(folder: str, name: str) -> str:
    """A path that is named from a folder."""
    return os.path.normpath(Path(folder, name))


def _closing(text: str, begin: int) -> int:
    """The brace that closes the one at ``begin``."""
    depth = 0
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


def forbid_carriage_returns(path: str, text: str) -> None:
    """Raises ConfigError for line ends that bash takes for a part of a word."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.endswith("\r") and not line.lstrip().startswith("#"):
            raise ConfigError(
                f"{Path(path).name}:{number}: expected lines that end in \\n, got \\r\\n, whose \\r bash "
                f"takes for a part of the line's last word: sed -i 's/\\r$//' {path}"
            )

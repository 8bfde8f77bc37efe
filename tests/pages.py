"""Reads README.md, SKILL.md and docs/*.md: their blocks of code, and the commands that they print."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
SKILL = ROOT / "SKILL.md"
COMMONMARK = MarkdownIt("commonmark").enable("table")
LABELS = {"python": "python", "pycon": "session", "yaml": "yaml"}  # language of a fence -> kind
# What a command in a sentence begins with. In a block every line that is nothing else is a command.
PROGRAMS = ("slime-ext", "make", "python", "pip", "pytest", "bash", "git")
VARIABLE = re.compile(r"[A-Z_]+=")


class Shown(NamedTuple):
    """Lines that a page tells its reader to type, one after the other."""

    page: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.lines[0]}"


def blocks(text):
    """What is code, in a fence or indented, without its last line break."""
    tokens = COMMONMARK.parse(text)
    return [token.content.removesuffix("\n") for token in tokens if token.type in ("fence", "code_block")]


def sessions(text):
    """Returns the examples of all fences for doctest, which would read a closing fence as output."""
    return "\n\n".join(block for block in blocks(text) if block.startswith(">>> "))


def kind_of(block):
    """What a block of code is: everything that is not known to be something else is ``shell``."""
    if block.startswith(">>> "):
        return "session"
    if block.startswith("--"):
        return "flags"
    if block.startswith(("slime_ext: ", "slime_ext.steps[")):
        return "output"
    if re.match(r"[a-z_]+(\.[a-z_]+)+=\S", block):
        return "overrides"
    try:
        mapping = yaml.safe_load(block)
        if isinstance(mapping, dict) and all(re.fullmatch(r"\w+", str(key)) for key in mapping):
            return "yaml"
    except yaml.YAMLError:
        pass
    try:
        is_python = not isinstance(ast.parse(block).body[0], ast.Expr)
    except SyntaxError:
        is_python = False
    return "python" if is_python else "shell"


def parts(text):
    """Yields (kind, text) of each block. An empty line ends it, unless it is Python or a session.

    A fence's language is its kind, save for what one types.
    """
    for token in COMMONMARK.parse(text):
        if token.type not in ("fence", "code_block"):
            continue
        whole = textwrap.dedent(token.content).strip("\n")
        labelled = LABELS.get(token.info.strip())
        if (kind := labelled or kind_of(whole)) in ("python", "session"):
            yield kind, whole
        else:
            pieces = re.split(r"\n(?:\s*\n)+", whole)
            yield from ((labelled or kind_of(piece), piece) for piece in pieces)


def in_sentences(text):
    """Yields what is written as code in sentences and tables."""
    for token in COMMONMARK.parse(text):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def commands(path):
    """Yields what a page tells its reader to type. In a sentence ``slime-ext train`` alone is a name."""
    page, text = path.name, path.read_text()
    for kind, part in parts(text):
        if kind == "shell":
            yield Shown(page, tuple(part.replace("\\\n", "").splitlines()))
    for code in in_sentences(text):
        words = code.split()
        while words and VARIABLE.match(words[0]):
            words = words[1:]
        if len(words) > 1 and words[0] in PROGRAMS and not re.fullmatch(r"slime-ext [a-z]+", code):
            yield Shown(page, (code,))


def named(path):
    """Returns the commands of slime-ext that a page calls by name."""
    found = (re.fullmatch(r"slime-ext ([a-z]+)", code) for code in in_sentences(path.read_text()))
    return {match[1] for match in found if match}


def simple(line):
    """Returns the simple commands of a line as lists of words, without redirections and the words of a loop.

    >>> simple("cd A && B=1 slime-ext x 'y z' > FILE")
    [['cd', 'A'], ['B=1', 'slime-ext', 'x', 'y z']]
    >>> simple("python -m x | slime-ext convert -")
    [['python', '-m', 'x'], ['slime-ext', 'convert', '-']]
    >>> simple("slime-ext report DIR [DIR ...] [--out FILE.png]")
    [['slime-ext', 'report', 'DIR', 'DIR', '--out', 'FILE.png']]
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&>;|")
    lexer.whitespace_split, lexer.commenters = True, ""
    found = [[]]
    for word in lexer:
        if word in ("&&", ";", "|"):
            found.append([])
        elif word != "..." and not word.startswith("...]"):
            found[-1].append(word)
    found = [words[: words.index(">")] if ">" in words else words for words in found]
    return [[_without_brackets(word) for word in words] for words in found if words]


def _without_brackets(word):
    """Without the brackets that say that a word may be left out."""
    word = word.removeprefix("[")
    return word.removesuffix("]") if "[" not in word else word

"""Every page, as a CommonMark renderer with GitHub's tables reads it: quotations, tables, code and links.

GitHub shows `>>>` at the margin as three nested quotations, and a table with a short row as another table.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.pages import COMMONMARK, ROOT

OTHERS = {"build", ".git", ".venv", ".venv-docs"}  # walking through their 100,000 files takes 0.7 s
EVERY = sorted(
    path
    for folder, pattern in [
        (ROOT, "*.md"),
        *((each, "**/RESULTS.md") for each in ROOT.iterdir() if each.name not in OTHERS),
        (ROOT / "docs", "*.md"),
    ]
    for path in folder.glob(pattern)
)
HAND_WRITTEN = [path for path in EVERY if path.name != "RESULTS.md"]
ATTRIBUTE = {"image": "src", "link_open": "href"}


def body(path: Path) -> str:
    """The text without the front matter of SKILL.md."""
    return re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.S)


def quotations(text: str) -> list[str]:
    """The first line of each nested quotation, which is nearly always a doctest at the margin."""
    lines, depth, nested = text.splitlines(), 0, []
    for token in COMMONMARK.parse(text):
        depth += {"blockquote_open": 1, "blockquote_close": -1}.get(token.type, 0)
        if token.type == "blockquote_open" and depth > 1:
            nested.append(lines[token.map[0]])
    return nested


def broken_tables(text: str) -> list[str]:
    """Rows that are shown as text, and rows with more or fewer cells than their head."""
    lines, broken, cells = text.splitlines(), [], 0
    for token in COMMONMARK.parse(text):
        if token.type == "inline" and re.search(r"^\|", token.content, re.M) and token.level == 1:
            broken.append(token.content.splitlines()[0])
        if token.type == "table_open":
            cells = 0
        if token.type == "tr_open":
            row = lines[token.map[0]]
            found = len(re.findall(r"(?<!\\)\|", row.strip().strip("|"))) + 1
            cells = cells or found
            broken += [row] * (found != cells)
    return broken


def indented(text: str) -> list[str]:
    """Code without a fence, which has no colours and no button to copy it."""
    return [token.content for token in COMMONMARK.parse(text) if token.type == "code_block"]


def links(text: str) -> list[str]:
    """The targets of links and pictures."""
    children = [child for token in COMMONMARK.parse(text) for child in token.children or ()]
    return [str(child.attrs[ATTRIBUTE[child.type]]) for child in children if child.type in ATTRIBUTE]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    tokens = COMMONMARK.parse(text)
    found: list[str] = []
    for head, title in pairwise(tokens):
        if head.type == "heading_open":
            words = "".join(
                child.content
                for child in title.children
                if child.type in ("text", "code_inline", "softbreak")
            )
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.append(slug + (f"-{found.count(slug)}" if slug in found else ""))
    return {*found}


def dangling(path: Path, text: str) -> list[str]:
    """Relative links whose file or heading does not exist."""
    missing = []
    for target in links(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in anchors(body(file))):
            missing.append(target)
    return missing


@pytest.mark.parametrize("path", EVERY, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_renders(path):
    text = body(path)
    assert not quotations(text), "put doctests into a fence"
    assert not broken_tables(text)
    assert not dangling(path, text)
    assert path not in HAND_WRITTEN or not indented(text), "put code into a fence"


def test_what_does_not_render_is_seen(tmp_path):
    assert quotations("text\n\n>>> 1 + 1\n2\n") == [">>> 1 + 1"] * 2
    assert not quotations("```pycon\n>>> 1 + 1\n2\n```\n") and not quotations("> one\n")
    head = "| a | b |\n| --- | --- |\n"
    assert broken_tables(head + "| 1 |\n") == ["| 1 |"] and not broken_tables(head + "| 1 | `x \\| y` |\n")
    assert broken_tables("text\n| a | b |\n| -- |\n| 1 | 2 |\n") == ["text"]
    assert indented("text\n\n    code\n") and not indented("- item\n\n    more\n")
    assert anchors("# A `b_c`: d, e\n\n## F\n\n## F\n") == {"a-b_c-d-e", "f", "f-1"}
    page = tmp_path / "page.md"
    page.write_text("# One title\n")
    text = "[a](page.md#one-title) [b](page.md#two) [c](other.md) ![d](d.png) [e](https://x.y)\n"
    assert dangling(page, text) == ["page.md#two", "other.md", "d.png"]

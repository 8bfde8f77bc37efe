"""README.md and docs/ as mkdocs reads them: the README is index.md, links into the repository stay its own.

python docs/site.py build/docs && mkdocs build --strict      # `make docs`
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIRECTIVES = re.compile(r"^<!-- (:::.*?) -->$", re.M | re.S)  # of mkdocstrings; GitHub hides comments
OUTSIDE = re.compile(
    r"\[[^\]]+\]\((?:\.\./)?((?:examples|configs|benchmarks|tests)/[^)]*|SKILL\.md)\)"
)  # a link that leaves docs/
PAGE = re.compile(r"\[(\w+\.md)\]\((\1(?:#[\w-]+)?)\)")  # a link whose text is a page's file name
PICTURE = re.compile(r"^(!\[[^\]]*\]\(img/(\w+))\.png\)$", re.M)


def page(text: str) -> str:
    """A page's text, with links that leave docs/ as paths, and with the reference that comments ask for.

    Other links show the title of their page. Pictures get their dark variants. Long lines of text wrap.
    """
    text = DIRECTIVES.sub(r"\1", PICTURE.sub(_in_both_palettes, text))
    text = text.replace("```text\n", "``` { .text .wrap }\n").replace("](../README.md", "](index.md")
    text = OUTSIDE.sub(lambda link: f"`{link[1]}`", text)
    return PAGE.sub(lambda link: f"[{title_of(link[1])}]({link[2]})", text)


def title_of(name: str) -> str:
    """The heading of a page."""
    first = (ROOT / "docs" / name).read_text().split("\n", 1)[0]
    return first.removeprefix("# ")


def _in_both_palettes(found: re.Match[str]) -> str:
    """A picture that has a dark variant, NAME_dark.png, as two pictures of which the theme shows one."""
    start, name = found.groups()
    if not (ROOT / f"docs/img/{name}_dark.png").exists():
        return found[0]
    return f"{start}.png#only-light)\n{start}_dark.png#only-dark)"


def main(folder: str) -> None:
    """Writes the pages and pictures below ``folder``."""
    out = Path(folder)
    shutil.rmtree(out, ignore_errors=True)
    for name in ("img", "css"):
        shutil.copytree(ROOT / "docs" / name, out / name)
    for path in (ROOT / "docs").glob("*.md"):
        (out / path.name).write_text(page(path.read_text()))
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](").replace("[docs/", "[")
    (out / "index.md").write_text(page(readme))


if __name__ == "__main__":
    main(sys.argv[1])

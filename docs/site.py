"""README.md and docs/ as mkdocs reads them: the README is index.md, links into the repository stay its own.

python docs/site.py build/docs && mkdocs build --strict      # `make docs`
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSOLE = re.compile(r"^>>> .*\n(?:(?:>>> |\.\.\. |\S).*\n)*", re.M)  # doctests stand at the margin here


def page(text: str) -> str:
    """A page's text with its doctests indented, as code, and links that leave docs/ as words."""
    text = CONSOLE.sub(lambda m: re.sub("^", "    ", m[0].rstrip("\n"), flags=re.M) + "\n", text)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)?(?:examples|configs)/[^)]*\)", r"`\1`", text)


def main(folder: str) -> None:
    """Writes the pages and pictures below ``folder``."""
    out = Path(folder)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "docs/img", out / "img")
    for path in (ROOT / "docs").glob("*.md"):
        (out / path.name).write_text(page(path.read_text()))
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    (out / "index.md").write_text(page(readme))


if __name__ == "__main__":
    main(sys.argv[1])

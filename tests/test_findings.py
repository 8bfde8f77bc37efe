"""The form of findings/: rows in its README, pinned packages, no slime_ext. The scripts run by hand."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
TORCH = re.search(r"TORCH:-torch==([\d.]+)", (FOLDER / "lib" / "environment.sh").read_text()).group(1)
ROW = re.compile(r"\| `(?P<script>\w+\.sh)` \| .+ \| .+ \| (?P<versions>[^|]+) \| \d+ \|")
PROGRAM = re.compile(r"<<'PYTHON'[^\n]*\n(.*?)^PYTHON$", re.DOTALL | re.MULTILINE)
# Examples: numpy==2.4.6, "mlx[cpu]==0.32.4" and torch, whose version lib/environment.sh decides.
PACKAGE = re.compile(r"\"?(?P<name>[\w.-]+)(?:\[\w+\])?==(?P<version>[\w.]+)\"?|torch")


def rows() -> list[re.Match[str]]:
    lines = (FOLDER / "README.md").read_text().splitlines()
    return [
        ROW.fullmatch(line) or pytest.fail(f"not a row: {line}") for line in lines if line.startswith("| `")
    ]


def pinned(script: Path) -> set[tuple[str, str]]:
    """Returns the names and versions of the packages that a script installs."""
    text = script.read_text()
    words = re.search(r"lib/environment\.sh\" (.+)", text).group(1).split()
    words += re.findall(r"-m pip .* (\S+==\S+)$", text, re.MULTILINE)
    packages = [
        PACKAGE.fullmatch(word) or pytest.fail(f"{script.name}: {word} is not pinned") for word in words
    ]
    return {(package["name"] or "torch", package["version"] or TORCH) for package in packages}


def test_each_script_has_a_row() -> None:
    assert sorted(row["script"] for row in rows()) == [script.name for script in SCRIPTS]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["script"])
def test_a_row_has_the_versions_that_its_script_installs(row: re.Match[str]) -> None:
    assert {tuple(version.split()) for version in row["versions"].split(", ")} <= pinned(
        FOLDER / row["script"]
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_has_the_form(script: Path) -> None:
    text = script.read_text()
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert pinned(script)
    calls = [
        node
        for code in PROGRAM.findall(text)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
    ]
    assert any(isinstance(call.func, ast.Name) and call.func.id == "expect" for call in calls)
    assert "slime_ext" not in text

"""``slime-ext doctor [LAUNCH_SCRIPT]``: what is installed and usable, and whether a launch can work here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from slime_ext.errors import SlimeExtError
from slime_ext.tools.commands import installed, light
from slime_ext.tools.commands.arguments import OWN, Arguments, apart, gathered
from slime_ext.tools.commands.installed import COMPONENTS
from slime_ext.tools.commands.output import console, table

WRONG = 1
STYLES = {"ok": "green", "wrong": "red", "missing": "red", "-": ""}
UNLESS = {  # component -> the flag without which a launch needs it
    "Transformer Engine": "--transformer-impl local",
    "NVIDIA apex": "--no-gradient-accumulation-fusion",
}


class Row(NamedTuple):
    """One line of the table. ``state`` is a key of STYLES; with ``wrong`` or ``missing`` it cannot work."""

    name: str
    found: str
    state: str
    note: str = ""


def main(argv: list[str]) -> int:
    """Prints the table; 1 where the launch script's setup cannot work on this machine."""
    parser = argparse.ArgumentParser(
        prog="slime-ext doctor", description="What is installed, and what would run."
    )
    what = "a launch script, or a YAML of --custom-config-path"
    parser.add_argument("script", nargs="?", metavar="LAUNCH_SCRIPT", help=what)
    what = "the checkout of slime; default: the one that imports"
    parser.add_argument("--slime-dir", metavar="DIR", help=what)
    parser.epilog = OWN
    words, own = apart(argv)
    given = parser.parse_args(words)
    arguments = _arguments(given.script, own)
    rows = diagnose(arguments, given.slime_dir)
    if given.script:
        rows += what_runs(given.script, own)
    cells = ((name, found, Text(state, STYLES[state]), note) for name, found, state, note in rows)
    console().print(table(cells, ("part", "found", "state", "note")))
    return WRONG if any(row.state in ("wrong", "missing") for row in rows) else 0


def needed(arguments: Arguments) -> set[str]:
    """The components without which a launch cannot work."""
    if not arguments.launch.program:
        return {"Python", "PyTorch"}
    flags = set(map(str, arguments.launch.flags))
    spared = {part for part, flag in UNLESS.items() if flag in flags}
    return {*COMPONENTS, "slime"} - spared - {"Triton"}


def diagnose(arguments: Arguments, slime_dir: str | None) -> list[Row]:
    """One row per component, judged by whether the launch needs it."""
    required, rows = needed(arguments), []
    probes = {**COMPONENTS, "slime": lambda: installed.slime(slime_dir)}
    for name, (found, usable, note) in ((name, probe()) for name, probe in probes.items()):
        lacking = ("wrong" if found else "missing") if name in required else "-"
        if note == installed.CORE_ALONE and arguments.launch.program:
            usable, lacking, note = False, "wrong", f"{note}: slime needs Megatron-LM on PYTHONPATH"
        rows.append(Row(name, found or "none", "ok" if usable else lacking, note))
    return rows


def what_runs(path: str, own: Sequence[str] = ()) -> list[Row]:
    """The correction that the file leads to."""
    try:
        checked = light.call("slime_ext.tools.commands.check:check", path, None, own)
    except SlimeExtError as error:
        return [Row("correction", "none", "wrong", str(error))]
    if not checked.uses_ours:
        return [Row("correction", "none", "-", f"{checked.line}: slime-ext check {path}")]
    state = "-" if checked.unread else "ok"
    return [Row("correction", checked.line, state, "; ".join((*checked.notes, *checked.unread)))]


def _arguments(path: str | None, own: Sequence[str]) -> Arguments:
    """As far as they can be read; what is wrong with them is a row of the table."""
    try:
        return gathered(path, None, own) if path else Arguments()
    except SlimeExtError:
        return Arguments()

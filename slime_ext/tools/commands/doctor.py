"""``slime-ext doctor [LAUNCH_SCRIPT]``: what is installed and usable, and whether a launch can work here."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from rich.text import Text

from slime_ext.errors import SlimeExtError
from slime_ext.tools.commands import installed, light
from slime_ext.tools.commands.arguments import SLIME, Arguments, gathered
from slime_ext.tools.commands.installed import COMPONENTS
from slime_ext.tools.commands.output import console, table

WRONG = 1
STYLES = {"ok": "green", "wrong": "red", "missing": "red", "-": ""}


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
    parser.add_argument(
        "script",
        nargs="?",
        metavar="LAUNCH_SCRIPT",
        help="a launch script, or a YAML of --custom-config-path",
    )
    parser.add_argument(
        "--slime-dir", metavar="DIR", help="the checkout of slime; default: the one that imports"
    )
    given = parser.parse_args(argv)
    asked = given.script or None
    arguments = _arguments(asked)
    launcher = arguments.launcher
    rows = diagnose(launcher, arguments, given.slime_dir)
    if asked:
        rows += what_runs(asked, launcher, arguments, rows)
    cells = ((name, found, Text(state, STYLES[state]), note) for name, found, state, note in rows)
    console().print(table(cells, ("part", "found", "state", "note")))
    return WRONG if any(row.state in ("wrong", "missing") for row in rows) else 0


def needed(launcher: str | None, arguments: Arguments) -> set[str]:
    """The components without which a launch cannot work."""
    if launcher != SLIME:
        return {"Python", "PyTorch"}
    found = {*COMPONENTS, "slime"} - {"Triton", "Transformer Engine", "NVIDIA apex"}
    if arguments.get("transformer_impl") != "local":
        found.add("Transformer Engine")
    if arguments.get("gradient_accumulation_fusion") is not False:
        found.add("NVIDIA apex")  # the output layer's fused gradient accumulation is apex's
    return found


def diagnose(launcher: str | None, arguments: Arguments, slime_dir: str | None) -> list[Row]:
    """One row per component, judged by whether the launch needs it."""
    required, rows = needed(launcher, arguments), []
    probes = {**COMPONENTS, "slime": lambda: installed.slime(slime_dir)}
    for name, (found, usable, note) in ((name, probe()) for name, probe in probes.items()):
        lacking = ("wrong" if found else "missing") if name in required else "-"
        if note == installed.CORE_ALONE and launcher == SLIME:
            usable, lacking, note = False, "wrong", f"{note}: slime needs Megatron-LM on PYTHONPATH"
        rows.append(Row(name, found or "none", "ok" if usable else lacking, note))
    return rows


def what_runs(path: str, launcher: str | None, arguments: Arguments, rows: list[Row]) -> list[Row]:
    """The correction that the file leads to, and how what it needs gets to it."""
    try:
        checked = light.call("slime_ext.tools.commands.check:check", path)
    except SlimeExtError as error:
        return [Row("correction", "none", "wrong", str(error))]
    found = [Row("launcher", launcher or "not said by this file", "ok" if launcher else "-")]
    if not checked.uses_ours:
        return [*found, Row("correction", "none", "-", f"{checked.line}: slime-ext check {path}")]
    found.append(Row("correction", checked.line, "ok", "; ".join(checked.notes)))
    if checked.needs_target:
        found.append(_carried(arguments, launcher, rows))
    return found


def _carried(arguments: Arguments, launcher: str | None, rows: list[Row]) -> Row:
    is_patched = any(row.name == "slime" and row.note == installed.PATCHED for row in rows)
    by = {
        "slime_ext.host.init": arguments.get("custom_megatron_init_path") == "slime_ext.host.init",
        "slime": is_patched,
    }
    for who in (who for who, passes in by.items() if passes):
        return Row("cur_log_probs", f"passed by {who}", "ok")
    return Row("cur_log_probs", "none", "missing", "add --custom-megatron-init-path slime_ext.host.init")


def _arguments(path: str | None) -> Arguments:
    """As far as they can be read; what is wrong with them is a row of the table."""
    try:
        return gathered(path) if path else Arguments()
    except SlimeExtError:
        return Arguments()

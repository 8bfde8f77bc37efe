"""Formats presets for ``slime-ext presets``: as a table, as YAML and as plain torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

from rich.table import Table

from slime_ext import presets
from slime_ext.config.files import of_package, read_mapping
from slime_ext.config.load import to_mapping
from slime_ext.config.words import brief
from slime_ext.tools import decision
from slime_ext.tools.commands.output import console, plain, yaml_of
from slime_ext.tools.plain_torch import function_of, obstacle
from slime_ext.tools.wording import file_of, flags_of, needs

WIDE = 120  # width of a terminal from which a preset is one row of several columns
COLUMNS = ("name", "use when", "numerator", "loss", "steps", "needs")


def print_preset(name: str) -> None:
    """Prints a preset as YAML and as plain torch. Raises ConfigError for an unknown name."""
    print(plain(f"{text_of(name)}\n\n{torch_of(name)}"))


def text_of(name: str) -> str:
    """Returns the YAML file of a preset or an alias, with comments on its use."""
    preset, canonical = presets.find(name), presets.ALIASES.get(name, name)
    lines = {
        f"{name} is another name of {canonical}": name != canonical,
        f"{canonical}: {preset.formula}": True,
        **{
            f"{key.capitalize()}: {advice().get(canonical, {}).get(key)}": canonical in advice()
            for key in ("use", "risk")
        },
        f"Needs: {needs(preset.correction)}": True,
        f"Source: {preset.source}": True,
    }
    wrapped = [_comment(line) for line, is_said in lines.items() if is_said]
    keys = file_of(to_mapping(preset.correction), preset.correction)
    flags = f"# Flags: {flags_of(canonical, preset.correction)}"
    return "\n".join([*wrapped, flags, "", yaml_of(keys)])


def torch_of(name: str) -> str:
    """Returns the function in plain torch, or a comment that says why there is none."""
    why_not = obstacle(presets.get(name))
    if why_not:
        return _comment(f"Cannot be written in plain torch for one response: {why_not}")
    written = f"# The same in plain torch (--out {name}.py writes it):"
    return f"{written}\n\n{function_named(name)}"


def function_named(name: str) -> str:
    """Returns the function in plain torch. Raises ConfigError if one response is not enough."""
    preset = presets.find(name)
    return function_of(name, preset.correction, preset.formula)


def _comment(text: str) -> str:
    return textwrap.fill(f"# {text}", 100, subsequent_indent="#   ", break_on_hyphens=False)


@cache
def advice() -> dict[str, Any]:
    """Reads configs/presets.yaml.

    It has, by name, when to use a preset, its risk, and the kinds of runs it is for.
    """
    return read_mapping(str(of_package("configs/presets.yaml")))


def print_table(kind: str | None, rows: Sequence[decision.Row] = ()) -> None:
    """Prints one row per preset; for a kind of run, those that fit it and the rows of the decision table.

    On a narrow terminal, all cells but the name share one column.
    """
    out = console(width=200)
    is_wide = out.width >= WIDE
    table = Table(box=None, pad_edge=False, show_header=is_wide)
    for column in COLUMNS if is_wide else COLUMNS[:2]:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for name, preset in presets.PRESETS.items():
        if kind is not None and kind not in advice().get(name, {}).get("for", ()):
            continue
        keys = to_mapping(preset.correction)
        loss = keys["surrogate"] if isinstance(keys["surrogate"], str) else brief([keys["surrogate"]])
        aliases = [f"= {alias}" for alias, other in presets.ALIASES.items() if other == name]
        use = advice().get(name, {}).get("use", "")
        row = (use, keys["numerator"], loss, brief(keys["steps"]), needs(preset.correction))
        said = "\n".join(f"{column} {cell}" for column, cell in zip(COLUMNS[1:], row, strict=True))
        table.add_row("\n".join([name, *aliases]), *(row if is_wide else (said,)))
    out.print(table)
    for applicable in rows:
        line = f"\n{decision.plain(applicable.run)}: {decision.plain(applicable.advice)}."
        out.print(line, markup=False, highlight=False)

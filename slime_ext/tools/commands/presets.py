"""``slime-ext presets``: the table; ``slime-ext presets NAME``: formula, resolved keys, what to paste."""

from __future__ import annotations

import argparse

from rich.table import Table

from slime_ext import presets
from slime_ext.config.files import located, of_package
from slime_ext.config.load import to_mapping
from slime_ext.config.words import brief
from slime_ext.tools.commands.output import console, needs, yaml_of
from slime_ext.tools.wording import flags_of

WIDE = 120  # columns of a terminal from which a preset is one row
COLUMNS = ("name", "numerator", "loss", "steps", "needs", "source")


def main(argv: list[str]) -> int:
    """Prints the table, or one preset."""
    parser = argparse.ArgumentParser(prog="slime-ext presets", description="Corrections by name.")
    parser.add_argument("name", nargs="?", help="show one: its formula, its keys, what to paste")
    args = parser.parse_args(argv)
    if args.name is None:
        _table()
    else:
        _one(args.name)
    return 0


def _table() -> None:
    """One row per preset; on a narrow terminal everything but its name is in one column."""
    out = console()
    is_wide = out.width >= WIDE
    table = Table(box=None, pad_edge=False, show_header=is_wide)
    for column in COLUMNS if is_wide else COLUMNS[:2]:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    aliases: dict[str, list[str]] = {}
    for alias, name in presets.ALIASES.items():
        aliases.setdefault(name, []).append(alias)
    for name, preset in presets.PRESETS.items():
        keys = to_mapping(preset.correction)
        loss = keys["surrogate"] if isinstance(keys["surrogate"], str) else brief([keys["surrogate"]])
        shown = "\n".join([name, *(f"= {alias}" for alias in aliases.get(name, ()))])
        source = preset.source.split(", http")[0]
        row = (keys["numerator"], loss, brief(keys["steps"]), needs(preset.correction), source)
        said = "\n".join(f"{column} {cell}" for column, cell in zip(COLUMNS[1:], row, strict=True))
        table.add_row(shown, *(row if is_wide else (said,)))
    out.print(table)


def _one(name: str) -> None:
    preset = presets.find(name)
    out = console()
    out.print(f"[bold]{name}[/bold]  {preset.formula}", markup=True)
    out.print(f"source: {preset.source}", markup=False)
    out.print(f"needs:  {needs(preset.correction)}\n", markup=False)
    out.print(yaml_of({"slime_ext": to_mapping(preset.correction)}), markup=False)
    out.print(f"\nflags:  {flags_of(name, preset.correction)}", markup=False, soft_wrap=True)
    canonical = presets.ALIASES.get(name, name)
    file = located(f"configs/presets/{canonical}.yaml", str(of_package("configs")))
    out.print(f"or:     --custom-config-path {file}", markup=False, soft_wrap=True)

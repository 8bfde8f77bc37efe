"""``slime-ext presets``: the table; ``slime-ext presets NAME``: one as a file of --custom-config-path."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from rich.table import Table

from slime_ext import presets
from slime_ext.config.files import of_package, read_mapping
from slime_ext.config.load import to_mapping
from slime_ext.config.words import brief
from slime_ext.errors import ConfigError
from slime_ext.tools.analysis.evidence import evidence
from slime_ext.tools.commands.output import console, needs, plain, yaml_of
from slime_ext.tools.wording import file_of, flags_of

WIDE = 120  # columns of a terminal from which a preset is one row
COLUMNS = ("name", "numerator", "loss", "steps", "needs", "source")


def main(argv: list[str]) -> int:
    """Prints the table, or one preset's file."""
    parser = argparse.ArgumentParser(prog="slime-ext presets", description="Corrections by name.")
    parser.add_argument("name", nargs="?", help="print its file: formula, risk, source, flags, keys")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the file there")
    args = parser.parse_args(argv)
    if args.name is None:
        _table()
    elif args.out is None:
        print(plain(text_of(args.name)))
    else:
        try:
            args.out.write_text(text_of(args.name) + "\n")
        except OSError as error:
            raise ConfigError(f"--out {args.out}: expected a file to write, got {error.strerror}") from None
    return 0


def text_of(name: str) -> str:
    """The file of a preset or an alias, with what is to be known of it above the keys."""
    preset, canonical = presets.find(name), presets.ALIASES.get(name, name)
    known = read_mapping(str(of_package("configs/presets.yaml"))).get(canonical, {})
    lines = {
        f"{name} is another name of {canonical}": name != canonical,
        f"{canonical}: {preset.formula}": True,
        **{f"{key.capitalize()}: {text}": True for key, text in known.items()},
        **{f"Measured: {text}": True for text in measured(canonical)},
        f"Needs: {needs(preset.correction)}": True,
        f"Source: {preset.source}": True,
    }
    wrapped = [
        textwrap.fill(f"# {line}", 100, subsequent_indent="#   ", break_on_hyphens=False)
        for line, is_said in lines.items()
        if is_said
    ]
    keys = file_of(to_mapping(preset.correction), preset.correction)
    flags = f"# Flags: {flags_of(canonical, preset.correction)}"
    return "\n".join([*wrapped, flags, "", yaml_of(keys)])


def measured(name: str) -> list[str]:
    """Returns what runs of ours say of a preset, a sentence per condition."""
    return [
        f"{remedy.gain} against uncorrected runs of the same seeds; {condition.what}{condition.whose}"
        for condition, remedy in evidence().of(name)
    ]


def _table() -> None:
    """One row per preset; on a narrow terminal everything but its name is in one column."""
    out = console()
    is_wide = out.width >= WIDE
    table = Table(box=None, pad_edge=False, show_header=is_wide)
    for column in COLUMNS if is_wide else COLUMNS[:2]:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for name, preset in presets.PRESETS.items():
        keys = to_mapping(preset.correction)
        loss = keys["surrogate"] if isinstance(keys["surrogate"], str) else brief([keys["surrogate"]])
        aliases = [f"= {alias}" for alias, other in presets.ALIASES.items() if other == name]
        source = preset.source.split(", http")[0]
        row = (keys["numerator"], loss, brief(keys["steps"]), needs(preset.correction), source)
        said = "\n".join(f"{column} {cell}" for column, cell in zip(COLUMNS[1:], row, strict=True))
        table.add_row("\n".join([name, *aliases]), *(row if is_wide else (said,)))
    out.print(table)

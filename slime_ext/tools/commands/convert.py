"""Runs ``slime-ext convert FILE``: translates another system's settings for --custom-config-path."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_ext.config.files import read_mapping, text_of
from slime_ext.errors import ConfigError, check_known, cut
from slime_ext.hosts.contract import flag_of
from slime_ext.tools.commands.lazy_torch import load_later
from slime_ext.tools.commands.output import plain, yaml_of
from slime_ext.tools.convert import CONVERTED, overrides, read
from slime_ext.tools.convert.elsewhere import ELSEWHERE, elsewhere_of, refuse
from slime_ext.tools.convert.places import COMPOSED, Whole
from slime_ext.tools.wording import file_of

SCRIPTS = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", ".py")
# TRL's own files have no such block.
AXOLOTLS = "a block named trl is read as TRL's settings; axolotl has such a block with other weights"
ALONE = ["_self_"]  # Hydra's defaults list of a file that adds no other file


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext convert",
        description="Translates another system's correction into native keys, and prints the file.",
    )
    known = ", ".join(CONVERTED)
    whose = f"the system whose settings these are; needed if the keys fit several systems: {known}"
    parser.add_argument("--from", dest="system", metavar="SYSTEM", help=whose)
    parser.add_argument("--out", metavar="FILE", help="write the file there instead of printing it")
    parser.add_argument(
        "file",
        help="the correction's block, or the whole composed configuration: YAML, JSON or TOML; a script that "
        "calls verl; or - for standard input",
    )
    return parser


def main(argv: list[str]) -> int:
    """Prints native YAML, with a comment for each meaning that could surprise."""
    args = command_line().parse_args(argv)
    known = ", ".join(CONVERTED)
    args.system = args.system and spelt(args.system)
    if args.system in ELSEWHERE:
        refuse("--from", args.system, known)
    if args.system is not None:
        check_known("--from", "system", args.system, CONVERTED)
    where = "standard input" if args.file == "-" else args.file
    settings, notes = read_settings(args.file, args.system)
    if name := elsewhere_of(settings):
        refuse(where, name, known)
    text = plain(convert(args.system or system_of(where, settings), settings, notes))
    if args.out is None:
        print(text)
        return 0
    try:
        Path(args.out).write_text(f"{text}\n")
    except OSError as error:
        raise ConfigError(f"--out: expected a file to write, got {args.out}: {error.strerror}") from None
    print(f"wrote {args.out}: check it with slime-ext check {args.out}")
    return 0


def spelt(system: str) -> str:
    """Returns the system's name here: ms_swift for MS-Swift. A name that nobody has stays as it is."""

    def bare(name: str) -> str:
        return "".join(filter(str.isalnum, name.lower()))

    names = {bare(each.title): name for name, each in ELSEWHERE.items()}
    names |= {bare(name): name for name in (*ELSEWHERE, *CONVERTED)}
    return names.get(bare(system), system)


def system_of(path: str, settings: Mapping[str, Any]) -> str:
    """Returns the one system whose correction a file holds.

    Raises:
        ConfigError: no system fits, or several fit, and the same keys mean different algorithms in each.
    """
    systems = [name for name in CONVERTED if Whole(name, settings).is_of_the_system()]
    if len(systems) == 1:
        return systems[0]
    several = f"settings that {', '.join(systems[:-1])} and {systems[-1]} know" if systems else "none"
    choices = ", ".join(systems or CONVERTED)
    raise ConfigError(
        f"{path}: expected the correction of one system, got {several}: add --from SYSTEM, one of {choices}"
    )


def read_settings(path: str, system: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Reads a system's block, or its composed configuration, from a YAML, JSON or TOML file, and notes on it.

    Of a script only the overrides of verl's program are read. Nothing else is composed, because only the
    system itself can add other files. Without them the file could mean a different algorithm.

    Args:
        path: a file; - for standard input.

    Raises:
        ConfigError: the file cannot be read, is another script, or names other files that complete it.
    """
    where, text = ("standard input", sys.stdin.read()) if path == "-" else (path, text_of(path))
    how = COMPOSED.get(system or "", "add --from SYSTEM to see how to get such a file")
    if Path(path).suffix in SCRIPTS or text.startswith("#!"):
        if system in (None, "verl") and overrides.PROGRAM in text and not path.endswith(".py"):
            return overrides.read(where, text)
        raise ConfigError(f"{where}: expected a YAML, JSON or TOML file, got a script: {how}")
    settings = read_mapping(where, text, by_suffix=True)
    if settings.pop("defaults", ALONE) != ALONE:
        expected = "expected a composed configuration, got the key defaults, which adds other files"
        raise ConfigError(f"{where}: {expected}: {how}")
    return settings, []


def convert(system: str, whole: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Translates a block, or a configuration with it, into the text of a native file.

    Raises:
        ConfigError: as ``slime_ext.tools.convert.read``.
    """
    load_later()  # torch, which takes two seconds
    from slime_ext.config.load import read_config

    settings = Whole(system, whole)
    where, block = settings.block()
    block, loss_notes = settings.without_loss(where, block)
    reading = read(system, block)
    if where == "trl":
        loss_notes.append(AXOLOTLS)
    try:  # because the printed file must load
        correction = read_config(reading.mapping).correction
    except ConfigError as error:
        raise ConfigError(f"{system}: expected settings that slime_ext has, got {error}") from None
    file = file_of(reading.mapping, correction)
    outside = settings.outside(where, block)
    other_keys = [key for key, value in outside.items() if file.get(key) != value]
    if other_keys:
        copy = f"outside of {system}'s settings; copy what you need into the new file"
        loss_notes.append(f"{', '.join(map(cut, other_keys))}: {copy}")
    comments = [
        textwrap.fill(f"# note: {note}", 100, subsequent_indent="#   ", break_on_hyphens=False)
        for note in (*notes, *loss_notes, *reading.notes)
    ]
    flags = [f"# needs: {flag_of(key)} {value}" for key, value in reading.args.items()]
    origin = f"# converted from {system}{where and f': {where}'}"
    return "\n".join([origin, *comments, *flags, yaml_of(file)])

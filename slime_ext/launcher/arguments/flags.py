"""What one flag is: name, type, default, help. Types answer in one line instead of argparse's wording."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_ext.errors import did_you_mean

Convert = Callable[[str], Any]


def integer(text: str) -> int:
    """A whole number; ``2.0`` is refused."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got '{text}'") from None


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got '{text}'") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number, got '{text}'")
    return value


def text(word: str) -> str:
    """Any text but none."""
    if not word.strip():
        raise argparse.ArgumentTypeError(f"expected some text, got '{word}'")
    return word


def one_of(*choices: str) -> Convert:
    """A word out of `choices`, kept on the converter so that a YAML value can be checked against them too."""

    def convert(text: str) -> str:
        if text not in choices:
            known = ", ".join(choices)
            raise argparse.ArgumentTypeError(
                f"expected one of {known}, got '{text}'{did_you_mean(text, choices)}"
            )
        return text

    convert.choices = choices
    return convert


def refused(choice: str, why: str, *choices: str) -> Convert:
    """Like `one_of`, but `choice`, which the host has and we have not, gets its own answer."""
    among = one_of(*choices)

    def convert(text: str) -> str:
        if text in choice.split("|"):
            raise argparse.ArgumentTypeError(f"'{text}' {why}; use one of {', '.join(choices)}")
        return among(text)

    convert.choices = choices
    return convert


@dataclass(frozen=True)
class Flag:
    """One flag. `convert` None makes it a switch; `clears` names the dest a switch sets to False."""

    name: str
    convert: Convert | None = None
    default: Any = None
    help: str = ""
    nargs: str | None = None
    clears: str | None = None
    required: bool = False

    @property
    def dest(self) -> str:
        return self.clears or self.name.lstrip("-").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return self.convert is None

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        words = self.help.replace("%", "%%")
        if self.clears:
            parser.add_argument(self.name, dest=self.dest, action="store_false", help=words)
        elif self.is_switch:
            parser.add_argument(self.name, action="store_true", help=words)
        else:
            shown = "" if self.default is None else f" (default {self.default})"
            options = {
                "type": text if self.convert is str else self.convert,
                "default": self.default,
                "nargs": self.nargs,
                "help": words + shown,
            }
            parser.add_argument(self.name, metavar=_metavar(self), **options)


def _metavar(flag: Flag) -> str:
    words = {integer: "N", number: "X", str: "TEXT"}
    return words.get(flag.convert, "WORD")

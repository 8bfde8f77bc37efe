"""What one flag is: name, type, default, help. Its type, pydantic's, reads a word and a YAML value alike."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, TypeAdapter, ValidationError

from slime_ext.errors import ConfigError, did_you_mean

Text = Annotated[str, Field(pattern=r"\S")]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class Flag:
    """One flag. A `bool` is a switch; `clears` names the dest that a switch sets to False."""

    name: str
    type: Any = bool
    default: Any = None
    help: str = ""
    many: bool = False
    clears: str | None = None
    required: bool = False

    @property
    def key(self) -> str:
        """The flag's own name as an identifier."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def dest(self) -> str:
        """The attribute that it sets."""
        return self.clears or self.key

    @property
    def is_switch(self) -> bool:
        """Whether it stands alone on the command line."""
        return self.type is bool

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.type)

    def read(self, value: Any, where: str, of_words: bool = False) -> Any:
        """`value` in the flag's type.

        Args:
            where: what errors name.
            of_words: numbers may be spelled as text.

        Raises:
            ConfigError: a value of another type, or out of range.
        """
        if value is None and self.default is None and not self.is_switch:
            return None
        if self.many:
            return [self._one(v, where, of_words) for v in (value if isinstance(value, list) else [value])]
        return self._one(value, where, of_words)

    def _one(self, value: Any, where: str, of_words: bool) -> Any:
        try:
            return self._adapter.validate_python(value, strict=not (of_words and isinstance(value, str)))
        except ValidationError as error:
            wanted = _wanted(error.errors()[0]["msg"])
        hint = ""
        if get_origin(self.type) is Literal:
            hint = did_you_mean(str(value), get_args(self.type))
        elif isinstance(value, str) and wanted == "a valid number" and "e" in value:
            hint = ": write it as 1.0e-4, YAML reads 1e-4 as text"
        raise ConfigError(f"{where}: expected {wanted}, got {value!r}{hint}")

    def _word(self, word: str) -> Any:
        """As argparse wants a type: it names the flag itself."""
        try:
            return self._one(word, "", of_words=True)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from None

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Adds it to argparse, with the default."""
        words = self.help.replace("%", "%%")
        if self.is_switch:
            action = "store_false" if self.clears else "store_true"
            parser.add_argument(self.name, dest=self.dest, action=action, help=words)
            return
        shown = "" if self.default is None else f" (default {self.default})"
        parser.add_argument(
            self.name,
            type=self._word,
            default=self.default,
            nargs="+" if self.many else None,
            metavar=_metavar(self.type),
            help=words + shown,
        )


def _wanted(said: str) -> str:
    """pydantic's message as what was expected.

    >>> _wanted("Input should be a valid integer, unable to parse string as an integer")
    'a valid integer'
    """
    if said.startswith("String should"):
        return "some text"
    what = said.removeprefix("Input should be ").split(", unable")[0].split(", got")[0]
    return f"a number {what}" if what.startswith(("greater", "less")) else what


def _metavar(kind: Any) -> str:
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return {int: "N", float: "X", str: "TEXT"}.get(base, "WORD")

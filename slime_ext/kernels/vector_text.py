"""The Python text of a correction's steps: straight lines of numpy, over sequences and then over tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from slime_ext.correction import Correction
from slime_ext.kernels.writer import Line, Writer, literal
from slime_ext.ops import arrays, divergences
from slime_ext.ops.statistics import Need

READ = ("numbers", "ages", "l", "num", "beh", "adv", "mask", "finite", "ratios", "spread", "narrow")
# What a name is until a line sets it, and what changes nothing where it is joined with something else.
START = {"kept": "True", "all_w": "1.0", "all_clipped": "False", "never": "False"}
START_OF_TOKENS = {"keep": "finite", "w": "spread(all_w)", "clipped": "spread(all_clipped)"}
START_OF_TOKENS |= {"nowhere": "False"}
SHARED = {"w": "all_w", "clipped": "all_clipped"}
JOINS = {" | ": "False", " & ": "True"}
ACTED = ("acted", "all_acted")  # which other languages keep step by step
NOTES = ("clipped", "all_clipped", "changed")  # how names begin that only those need who ask for bounds


class Acted(NamedTuple):
    """What a step did to sequences."""

    step: int
    flags: np.ndarray | bool  # [S]
    inside: bool  # whether they say where it did nothing


class Decided(NamedTuple):
    """What the lines say; a number or a flag where all units have the same."""

    kept: np.ndarray | bool  # [S]
    acted: Sequence[Acted]  # what steps did that looked at sequences
    keep: np.ndarray  # [T] bool, without ``kept``: what is finite itself where no step looked at tokens
    weights: np.ndarray | float  # [S] if the program is ``shared``, else [T]
    clipped: np.ndarray | bool  # as the weights
    acting: Mapping[int, Sequence[np.ndarray]]  # steps that looked at tokens -> [T] flags each


class Program(NamedTuple):
    """A correction's steps, ready to be called with the sums [S] over sequences and all of READ by name."""

    decide: Callable[..., tuple]
    shared: bool  # whether all tokens of a sequence that are kept have its weight
    sound: bool  # whether a token that is not finite takes its sequence with it
    text: str

    def __call__(self, table: Sequence[np.ndarray], **read: Any) -> Decided:
        return Decided(*self.decide(table, **read))


class Numpy:
    """The language."""

    def call(self, name: str, *arguments: str) -> str:
        if (name, *arguments) == ("exp", "(l)"):
            return "ratios()"
        if (name, arguments[0]) == ("where", "here"):  # as all tokens are
            return f"spread({arguments[1]})" if arguments[1].isidentifier() else arguments[1]
        return f"{name}({', '.join(arguments)})"

    def no(self, flag: str) -> str:
        return f"no({flag})"

    def narrow(self, value: str) -> str:
        return f"narrow({value})"

    def at(self, array: str, index: str | int) -> str:
        return array if index == "owner" else f"{array}[{index}]"

    def number(self, value: float, *, wide: bool = False) -> str:
        return literal(value)


def program(correction: Correction, needs: tuple[Need, ...], *, notes: bool) -> Program:
    """What decides about packed tokens.

    Args:
        needs: of the table's rows.
        notes: whether anybody asks where bounds acted.
    """
    writer = Writer(correction, needs, Numpy())
    of_tokens = writer.lines()
    known = dict(START)
    lines = [f"{', '.join(writer.slot.values())}, = table"] if needs else []
    lines += [_set(START), *_statements(_noted(writer.ahead, notes), known)]
    start = START_OF_TOKENS | (SHARED if writer.shared else {})
    known |= {"clipped": known["all_clipped"], "nowhere": "False"}
    lines += [_set(start), *_statements(_noted(of_tokens, notes), known)]
    acting = (f"{i}: ({', '.join(flags)},)" for i, flags in writer.acting.items() if notes)
    acted = (f"Acted{act}".replace("'", "") for act in writer.acting_ahead if notes)
    lines += [f"return kept, [{', '.join(acted)}], keep, w, clipped, {{{', '.join(acting)}}}"]
    text = "\n    ".join([f"def decide(table, {', '.join(READ)}):", *lines]) + "\n"
    names = dict(FUNCTIONS)
    exec(compile(text, "<the steps of a correction>", "exec"), names)
    sound = any(step.unit == "sequence" for step in correction.steps)
    return Program(names["decide"], writer.shared, sound, text)


def _set(values: dict[str, str]) -> str:
    return f"{', '.join(values)} = {', '.join(values.values())}"


def _noted(lines: Iterable[Line], notes: bool) -> list[Line]:
    wanted = (line for line in lines if line[0] not in ACTED)
    return [line for line in wanted if notes or not line[0].startswith(NOTES)]


def _statements(lines: Iterable[Line], known: dict[str, str]) -> Iterator[str]:
    """Assignments, in which what is known to change nothing is left out; keeps ``known`` up to date."""
    for name, value in lines:
        for join, neutral in JOINS.items():
            if value.startswith(name + join) and known.get(name) == neutral:
                value = value.removeprefix(name + join)
        known[name] = known.get(value, "")
        yield f"{name} = {value}"


def _by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., np.ndarray]:
    return lambda *values: arrays.of(function(*map(torch.from_numpy, values)))


def _parts(weights: np.ndarray | float, mean: float) -> np.ndarray:
    """In float64: the mean may be smaller than any float32 while the largest weight over it is not."""
    found = np.divide(weights, mean, dtype=np.float64)
    return found.astype(getattr(weights, "dtype", np.float64), copy=False)


FUNCTIONS = {"where": np.where, "minimum": np.minimum, "maximum": np.maximum, "exp": np.exp}
FUNCTIONS |= {"Acted": Acted, "no": np.logical_not, "INF": np.inf, "parts": _parts}
FUNCTIONS |= {"squares": lambda values: np.square(values, dtype=np.float64)}
FUNCTIONS |= {name: _by_torch(f) for name, f in (divergences.OF_RATIO | divergences.OF_BOTH).items()}

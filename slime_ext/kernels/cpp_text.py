"""The C++ text of a correction's two passes: ``loops.cpp`` with what its steps say in the places for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from slime_ext.correction import OBSERVED, Correction
from slime_ext.kernels.passes import Parts, sizes_of
from slime_ext.kernels.writer import Line, Writer, literal
from slime_ext.metrics.columns import LARGEST
from slime_ext.metrics.layout import (
    AGES,
    COLUMNS,
    CURVE_COLUMNS,
    FIRST,
    LOG_PROBABILITIES,
    PER_SEQUENCE,
    POSITIONS,
    SHIFT,
    SIDE,
)
from slime_ext.ops.divergences import EDGE
from slime_ext.ops.statistics import Need, Over
from slime_ext.outcome import largest_factor

FOLDER = Path(__file__).parent
# Declared where the lines are put.
STATE = ("w", "keep", "clipped", "acted", "kept", "all_w", "all_clipped", "all_acted")
READ = {
    "bounds": "int64_t",
    "owners": "int64_t",
    "starts": "int64_t",
    "numerators": "float",
    "behaviors": "float",
    "masks": "uint8_t",
    "advantages": "float",
    "numbers": "double",
    "ages": "double",
    "groups": "uint8_t",
    "scales": "float",
    "losses": "float",
}
WRITTEN = {
    "table": "double",
    "kepts": "uint8_t",
    "keeps": "uint8_t",
    "weights": "float",
    "finites": "uint8_t",
    "log_ratios": "float",
    "clippeds": "uint8_t",
    "acteds": "int32_t",
    "factors": "float",
    "products": "float",
    "ratios": "float",
    "bounded_ones": "float",
    "rejected_ones": "float",
    "sums": "double",
    "highest": "double",
    "log_sums": "double",
}
ARRAYS = (*READ, *WRITTEN)  # in the order in which their addresses are handed over


class Cpp:
    """The language."""

    def call(self, name: str, *arguments: str) -> str:
        return f"{name}({', '.join(arguments)})"

    def no(self, flag: str) -> str:
        return f"!({flag})"

    def narrow(self, value: str) -> str:
        return f"narrow({value})"

    def at(self, array: str, index: str | int) -> str:
        return f"{array}[{index}]"

    def number(self, value: float, *, wide: bool = False) -> str:
        text = literal(value)
        return text if wide or "INF" in text else f"{text}f"


def source(correction: Correction, needs: tuple[Need, ...], parts: Parts) -> str:
    """A C++ file with ``statistics`` and ``correct``, to be compiled alone."""
    writer = Writer(correction, needs, Cpp())
    lines = writer.lines()
    places = _sizes(parts) | _constants(writer, parts) | _code(writer, lines) | _flags(writer, parts)
    text = (FOLDER / "loops.cpp").read_text()
    for name in ("measures.h", "lanes.h"):
        text = text.replace(f'#include "{name}"\n', (FOLDER / name).read_text())
    for name, value in places.items():
        text = text.replace(f"@{name}@", value)
    return f"constexpr double EDGE = {EDGE!r};\n{text}"


def _sizes(parts: Parts) -> dict[str, str]:
    sizes = (
        dict.fromkeys(("sums", "highest", "log_sums"), 0) if parts.layout is None else sizes_of(parts.layout)
    )
    return {f"{name}_size": str(size) for name, size in sizes.items()}


def _constants(writer: Writer, parts: Parts) -> dict[str, str]:
    layout = parts.layout
    slots = {need: i for i, need in enumerate(writer.needs)}
    numbers = {
        "ratio": slots.get(OBSERVED[0], 0),
        "count": slots.get(OBSERVED[1], 0),
        "curve_columns": len(CURVE_COLUMNS),
        "edges": len(POSITIONS),
        "shift": SHIFT,
        "first": FIRST,
        "side": SIDE,
        "per_sequence": len(PER_SEQUENCE),
    }
    flags = {
        "outcome": parts.outcome,
        "bounds_too": parts.bounds,
        "observe": parts.observe,
        "loss": parts.loss,
        "measure": layout is not None,
        "curves": layout is not None and layout.curves,
        "shared": writer.shared,
        "reads_advantages": any(step.reads_advantages for step in writer.correction.steps),
    }
    return {name: str(n) for name, n in numbers.items()} | {name: str(f).lower() for name, f in flags.items()}


def _code(writer: Writer, lines: list[Line]) -> dict[str, str]:
    edges = {"positions": POSITIONS, "ages": AGES, "log_probabilities": LOG_PROBABILITIES}
    sums = (f"sum{i}.{_adding(writer, need)};" for i, need in enumerate(writer.needs))
    all_sums = range(len(writer.needs))
    return {name: ", ".join(f"{_float(e)}" for e in values) for name, values in edges.items()} | {
        "columns": ", ".join(map(str.upper, COLUMNS)),
        "largest": _float(LARGEST[torch.float32]),
        "largest_factor": _float(largest_factor(torch.float32)),
        "pointers": "\n    ".join(_pointers()),
        "declared": " ".join(f"{_kind(need)} sum{i};" for i, need in enumerate(writer.needs)),
        "sums": "\n            ".join(sums),
        "tabled": "\n        ".join(f"table[{i} * sequences + owner] += sum{i}.total();" for i in all_sums),
        "ahead": "\n        ".join(_ahead(writer)),
        "steps": "\n                ".join(map(_statement, lines)),
    }


def _ahead(writer: Writer) -> Iterator[str]:
    """What is known about a sequence before its tokens are looked at."""
    for i in range(len(writer.needs)):
        yield f"const double s{i} = table[{i} * sequences + owner]; (void)s{i};"
    yield "const bool never = false; (void)never;"
    yield "bool kept = true, all_clipped = false;"
    yield "float all_w = 1.0f;"
    yield "int all_acted = 0;"
    yield from map(_statement, writer.ahead)
    together = 1 << (len(writer.correction.steps) + 1)
    yield f"if (groups && !groups[owner]) kept = false, all_acted |= {together};"


def _flags(writer: Writer, parts: Parts) -> dict[str, str]:
    """How the layout's flags are counted: those of a sequence once for all its tokens, the others token by
    token, and each question once."""
    asked = [] if parts.layout is None else [bits for _, bits in parts.layout.flags]
    unique = list(dict.fromkeys(asked))
    alone = {0: ["~finite"]} | writer.acting
    of_tokens = [" | ".join(flag for i in alone if bits >> i & 1 for flag in alone[i]) for bits in unique]
    counted = [acting for acting in dict.fromkeys(of_tokens) if acting]
    lines = map(_flag_line, range(len(unique)), unique, (counted.index(a) if a else None for a in of_tokens))
    return {
        "flags": str(len(asked)),
        "parts": str(len(counted)),
        "same": ", ".join(str(unique.index(bits)) for bits in asked),
        "acting": ", ".join(counted),
        "flag_lines": "\n        ".join(lines),
    }


def _flag_line(i: int, bits: int, counted: int | None) -> str:
    """Adds a range's tokens on which any of these steps acted: all of them, or those that were counted."""
    of_tokens = "I{}" if counted is None else f"recent.flagged[{counted}]"
    return f"flagged[{i}] += all_acted & {bits} ? recent.masked : {of_tokens};"


def _kind(need: Need) -> str:
    return "Sound" if need.name == "sound" else "Count" if _counts(need) else "Sum"


def _counts(need: Need) -> bool:
    """Of what exceeds a limit only 0 or not is asked, so that such tokens are counted."""
    return need.name == "count" or isinstance(need.name, Over)


def _adding(writer: Writer, need: Need) -> str:
    flags = {"count": "add(mask)", "sound": "add(mask, finite)"}
    return flags.get(need.name) or f"{'add' if _counts(need) else 'add_wide'}({writer.summand(need)})"


def _float(value: float) -> str:
    return f"{value!r}f" if isinstance(value, float) else f"{value}.0f"


def _statement(line: Line) -> str:
    name, value = line
    return f"{name} = {value};" if name in STATE else f"const auto {name} = {value};"


def _pointers() -> list[str]:
    read = [f"const {kind}* {name} = (const {kind}*)p[{i}];" for i, (name, kind) in enumerate(READ.items())]
    written = [
        f"{kind}* {name} = ({kind}*)p[{i}];" for i, (name, kind) in enumerate(WRITTEN.items(), len(READ))
    ]
    return read + written

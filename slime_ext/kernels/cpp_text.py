"""The C++ text of a correction's two passes: ``loops.cpp`` with what its steps say in the places for it."""

from __future__ import annotations

from pathlib import Path

import torch

from slime_ext.correction import OBSERVED, Correction
from slime_ext.kernels.passes import Parts, sizes_of
from slime_ext.kernels.writer import Line, Writer, literal
from slime_ext.metrics.layout import (
    AGES,
    BINS,
    COLUMNS,
    CURVE_COLUMNS,
    FIRST,
    LOG_PROBABILITIES,
    PER_SEQUENCE,
    POSITIONS,
    SHIFT,
    SIDE,
)
from slime_ext.metrics.measure import LARGEST
from slime_ext.ops.divergences import EDGE
from slime_ext.ops.statistics import Need, Over

FOLDER = Path(__file__).parent
STATE = ("w", "keep", "clipped", "acted", "kept")  # declared where the lines are put
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
    places = _sizes(parts) | _constants(writer, parts) | _code(writer, lines, parts)
    text = (FOLDER / "loops.cpp").read_text()
    for name, value in places.items():
        text = text.replace(f"@{name}@", value)
    return f"constexpr double EDGE = {EDGE!r};\n{(FOLDER / 'lanes.h').read_text()}\n{text}"


def _sizes(parts: Parts) -> dict[str, str]:
    sizes = (
        dict.fromkeys(("sums", "highest", "log_sums"), 0) if parts.layout is None else sizes_of(parts.layout)
    )
    return {f"{name}_size": str(size) for name, size in sizes.items()}


def _constants(writer: Writer, parts: Parts) -> dict[str, str]:
    layout = parts.layout
    slots = {need: i for i, need in enumerate(writer.needs)}
    numbers = {
        "statistics": len(writer.needs),
        "flags": 0 if layout is None else len(layout.flags),
        "ratio": slots.get(OBSERVED[0], 0),
        "count": slots.get(OBSERVED[1], 0),
        "columns": len(COLUMNS),
        "log_ratio": COLUMNS.index("log_ratio"),
        "curve_columns": len(CURVE_COLUMNS),
        "edges": len(POSITIONS),
        "shift": SHIFT,
        "first": FIRST,
        "side": SIDE,
        "bins": BINS,
        "per_sequence": len(PER_SEQUENCE),
        "group_bit": 1 << (len(writer.correction.steps) + 1),
    }
    flags = {
        "outcome": parts.outcome,
        "bounds_too": parts.bounds,
        "observe": parts.observe,
        "loss": parts.loss,
        "measure": layout is not None,
        "curves": layout is not None and layout.curves,
        "reads_advantages": any(step.reads_advantages for step in writer.correction.steps),
    }
    return {name: str(n) for name, n in numbers.items()} | {name: str(f).lower() for name, f in flags.items()}


def _code(writer: Writer, lines: list[Line], parts: Parts) -> dict[str, str]:
    edges = {"positions": POSITIONS, "ages": AGES, "log_probabilities": LOG_PROBABILITIES}
    flags = [] if parts.layout is None else [bits for _, bits in parts.layout.flags]
    unique = list(dict.fromkeys(flags))
    counted = (f"flagged[{i}] -= t.mask & ((acted & {bits}) != 0);" for i, bits in enumerate(unique))
    slots = (
        f"const double s{i} = table[{i} * sequences + owner]; (void)s{i};" for i in range(len(writer.needs))
    )
    sums = (f"sum{i}.{_adding(need)}({writer.summand(need)});" for i, need in enumerate(writer.needs))
    all_sums = range(len(writer.needs))
    return {name: ", ".join(f"{_float(e)}" for e in values) for name, values in edges.items()} | {
        "largest": _float(LARGEST[torch.float32]),
        "pointers": "\n    ".join(_pointers()),
        "declared": " ".join(f"Sum sum{i};" for i in all_sums),
        "sums": "\n            ".join(sums),
        "tabled": "\n        ".join(f"table[{i} * sequences + owner] += sum{i}.total();" for i in all_sums),
        "same": ", ".join(str(unique.index(bits)) for bits in flags),
        "flag_lines": "\n        ".join(counted),
        "ahead": "\n        ".join((*slots, "bool kept = true;", *map(_statement, writer.ahead))),
        "steps": "\n                ".join(map(_statement, lines)),
    }


def _adding(need: Need) -> str:
    """Ones are exact in float32 up to 2^24 a lane, and of what exceeds a limit only 0 or not is asked."""
    return "add" if isinstance(need.name, Over) or need.name in ("count", "sound") else "add_wide"


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

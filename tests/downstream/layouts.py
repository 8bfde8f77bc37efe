"""The same loss and gradient in every layout of a real host, with carriers and patched: measured, as a table.

``python -m tests.downstream.layouts --slime-dir DIR``, and again for further checkouts; ``--miles-dir DIR``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from slime_ext.patching.main import main as patch
from tests.downstream.host_loss import Case, Layout, measure
from tests.launcher.distributed import run_ranks

CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"preset": "token_is"},
    "sequence": {"preset": "seq_is"},
    "geometric, veto": {
        "steps": [
            {
                "reject": {
                    "unit": "sequence",
                    "statistic": "ratio",
                    "aggregate": "mean",
                    "low": 0.9,
                    "high": 1.1,
                }
            },
            {"veto": {"low": 0.55}},
            {"reweight": {"level": "token"}},
            {"truncate": {"high": 2.0}},
        ]
    },
    "turn": {"preset": "turn_tis"},
    "pure IS": {"preset": "pure_is"},
    "off_policy_is": {"preset": "off_policy_is"},
    "sequence rejection, masks all": {
        "mask_scope": "all",
        "steps": [{"reject": {"unit": "sequence", "aggregate": "sum", "low": 0.5, "high": 2.0}}],
    },
}
PER_TOKEN = {"calculate_per_token_loss": True}
LAYOUTS = {
    "1 process": Layout(),
    "CP2": Layout(cp=2),
    "TP2": Layout(tp=2),
    "TP2 x CP2": Layout(tp=2, cp=2),
    "DP2": Layout(dp=2),
    "PP2": Layout(pp=2),
    # A power of two: up to v0.3.0 gradients come from Megatron's fused cross entropy, in bfloat16, after
    # slime has scaled the loss by the number of micro-batches.
    "2 micro-batches": Layout(micro_batches=2),
    "allgather-CP": Layout(cp=2, flags={"allgather_cp": True}),
    "CP2, bshd": Layout(cp=2, flags={"qkv_format": "bshd"}),
    "recompute": Layout(flags={"recompute_loss_function": True}),
    "CP2, recompute": Layout(cp=2, flags={"recompute_loss_function": True}),
}
PER_TOKEN_LAYOUTS = {
    "per token": Layout(flags=PER_TOKEN),
    "per token, CP2": Layout(cp=2, flags=PER_TOKEN),
    "per token, TP2 x CP2": Layout(tp=2, cp=2, flags=PER_TOKEN),
    "per token, DP2": Layout(dp=2, flags=PER_TOKEN),
}
# What a release does not have yet, by a word that its loss lacks.
NEEDS = {"allgather-CP": "allgather_cp", "recompute": "recompute_loss_function", "bshd": '"bshd"'}
LOSSES = {
    "slime": "slime/backends/megatron_utils/loss.py",
    "miles": "miles/backends/training_utils/loss_hub/logit_processors.py",
}


def layouts_of(name: str, folder: Path) -> dict[str, Layout]:
    """The layouts that this host has."""
    source = (folder / LOSSES[name]).read_text()
    if name == "miles":
        source += (folder / "miles/backends/training_utils/loss.py").read_text()
    lacking = [layout for layout, word in NEEDS.items() if word not in source]
    return {key: value for key, value in LAYOUTS.items() if not any(word in key for word in lacking)}


def run(name: str, folder: Path, layout: Layout, cases: list[Case]) -> list[dict[str, Any]]:
    """The cases on all ranks of a layout, in fresh processes."""
    answers = run_ranks(measure, layout.ranks, name, str(folder), layout, cases)
    return next(answer for answer in answers if answer)


def cases(init: str | None = "slime_ext.host.init") -> list[Case]:
    """One for each correction."""
    return [Case(mapping, init=init) for mapping in CORRECTIONS.values()]


def distance(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Largest difference of losses and gradient norms, relative where they are above 1."""
    pairs = [(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in ("loss", "gradient")]
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)


def patched(name: str, folder: Path, into: Path) -> Path:
    """A copy of the host's package with our patches."""
    shutil.copytree(folder / name, into / name)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        patch(["apply", str(into), "0001"])
    return into


def row(name: str, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The figures on one process, and how far every layout and the patched host are from them."""
    alone = run(name, folder, Layout(), cases())
    per_token = run(name, folder, PER_TOKEN_LAYOUTS["per token"], cases())
    apart = {
        key: distance(alone, run(name, folder, layout, cases()))
        for key, layout in layouts_of(name, folder).items()
    }
    for key, layout in list(PER_TOKEN_LAYOUTS.items())[1:]:
        apart[key] = distance(per_token, run(name, folder, layout, cases()))
    with tempfile.TemporaryDirectory() as place:
        there = patched(name, folder, Path(place))
        for init in (None, "slime_ext.host.init"):
            key = "patched, with init" if init else "patched, without init"
            apart[key] = distance(alone, run(name, there, Layout(cp=2), cases(init)))
    return alone, apart


def table(rows: dict[str, tuple[list[dict[str, Any]], dict[str, float]]]) -> str:
    """Markdown: loss and gradient norm of every correction, then the distances."""
    lines = [f"| host | {' | '.join(CORRECTIONS)} |", "|---" * (len(CORRECTIONS) + 1) + "|"]
    for host, (alone, _) in rows.items():
        figures = " | ".join(f"{one['loss']:.6f} / {one['gradient']:.6f}" for one in alone)
        lines.append(f"| {host} | {figures} |")
    keys = list(dict.fromkeys(key for _, apart in rows.values() for key in apart if key != "1 process"))
    lines += ["", f"| layout | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]
    for key in keys:
        figures = " | ".join(f"{apart[key]:.0e}" if key in apart else "-" for _, apart in rows.values())
        lines.append(f"| {key} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table for the checkouts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--slime-dir", action="append", default=[], type=Path)
    parser.add_argument("--miles-dir", action="append", default=[], type=Path)
    args = parser.parse_args()
    named = [("slime", d) for d in args.slime_dir] + [("miles", d) for d in args.miles_dir]
    if not named:
        print("skipped: no --slime-dir and no --miles-dir")
        return
    print(table({folder.resolve().name: row(name, folder.resolve()) for name, folder in named}))


if __name__ == "__main__":
    main()

"""Compares converted weights and masks with systems that no wheel has; prints a Markdown table.

    python -m tests.peers.checkouts --slime CHECKOUT --fireworks FILE ... --verl-3984 FILE --batches 1000

Systems without an argument are left out. The exit status is 1 if a mask differs, or a weight by more than
``TOLERANCE``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_ext import load_config
from slime_ext.core.steps import Normalize
from slime_ext.tools.convert import read
from tests.batches import tokens
from tests.tools.convert.common import batch_of

TOLERANCE = 1e-5
UNNORMALISED = 1e-8  # verl and mis.py do not divide by a mean weight below this: such batches are left out
Rows = tuple[Tensor, Tensor, Tensor]  # [S, R] proximal, behavior, mask
Found = tuple[Tensor | None, Tensor]  # [S, R] weights (None: 1) and mask

PR3984 = (
    {"rollout_is": "sequence", "rollout_rs": "sequence", "rollout_rs_threshold": 2.0},
    {
        "rollout_rs": "geometric",
        "rollout_rs_threshold": 1.1,
        "rollout_rs_threshold_lower": 0.95,
        "rollout_token_veto_threshold": 1e-4,
    },
    {"rollout_is": "token", "rollout_rs": "token", "rollout_rs_threshold": 2.0},
)
MIS = tuple(
    {
        "use_tis": True,
        "use_rs": rs,
        "tis_level": level,
        "rs_level": "token",
        "tis_mode": mode,
        "tis_lower_bound": 0.5,
        "tis_upper_bound": 2.0,
        "rs_lower_bound": None,
        "rs_upper_bound": None,
        "rs_veto_threshold": 1.0e-4 if rs else None,
        "tis_batch_normalize": level == "token",
    }
    for level in ("token", "sequence", "geometric")
    for mode, rs in (("truncate", True), ("clip", False), ("mask", True))
)
FIREWORKS = (
    {"cap": 5.0, "level": "token"},
    {"cap": 5.0, "level": "sequence"},
    {"cap": 5.0, "level": "token", "icepop_threshold": 2.0},
)
PR169 = ({"tis_cap": 5.0, "tis_level": "token"}, {"tis_cap": 5.0, "tis_level": "sequence"})


def verl_block(module: ModuleType, block: dict[str, Any], rows: Rows) -> Found:
    """PR 3984 and today: one function, the block's fields as its keywords."""
    call = module.compute_rollout_correction_and_rejection_mask
    weights, mask, _ = call(*rows, **{"rollout_is": None, **block})
    return None if weights is None else weights.batch["rollout_is_weights"], mask


def slime_mis(module: ModuleType, block: dict[str, Any], rows: Rows) -> Found:
    """One list entry per sequence, those without response tokens left out: its mean counts them as 0."""
    held = [i for i in range(len(rows[2])) if rows[2][i].any()]
    lists = [[x[i] for i in held] for x in rows]
    names = ("train_log_probs", "rollout_log_probs", "loss_masks")
    weights, masks, _ = module.compute_mis_weights(
        SimpleNamespace(**block), **dict(zip(names, lists, strict=True))
    )
    found = [torch.zeros_like(rows[2]) for _ in range(2)]
    for i, w, m in zip(held, weights, masks, strict=True):
        found[0][i], found[1][i] = w, m
    return found[0], found[1]


def fireworks(module: ModuleType, block: dict[str, Any], rows: Rows) -> Found:
    """One sequence at a time, its response tokens alone, as run_loss_loop does."""
    config = (module.ISConfig if hasattr(module, "ISConfig") else module.TISConfig)(**block)
    weights = torch.ones_like(rows[0])
    for i, mask in enumerate(rows[2].bool()):
        if mask.any():
            weights[i, mask] = module.compute_tis_weight(rows[0][i, mask], rows[1][i, mask], config)[0]
    return weights, rows[2]


@functools.cache
def batch(seed: int) -> tuple[Rows, Any]:
    """The same batch padded [S, R] and packed."""
    sequences = batch_of(seed)
    longest = max(len(s["mask"]) for s in sequences)
    rows = [
        torch.tensor([list(s[k]) + [0] * (longest - len(s["mask"])) for s in sequences], dtype=torch.float64)
        for k in ("proximal", "behavior", "mask")
    ]
    return (rows[0], rows[1], rows[2]), tokens(sequences)[0]


def compare(
    system: str, block: dict[str, Any], theirs: Callable[[Rows], Found], batches: int
) -> tuple[int, float, int]:
    """Batches compared, largest difference of a kept token's weight, tokens whose mask differs."""
    correction = load_config(read(system, block).mapping)
    normalizes = any(isinstance(step, Normalize) for step in correction.steps)
    count, largest, masks = 0, 0.0, 0
    for seed in range(batches):
        rows, packed = batch(seed)
        if not rows[2].any():
            continue  # verl raises on a batch without response tokens
        weights, mask = theirs(rows)
        if normalizes and float(weights.max()) < UNNORMALISED:
            continue
        inside = torch.zeros_like(rows[2], dtype=torch.bool)
        for i, length in enumerate(packed.segments.lengths):
            inside[i, :length] = True
        outcome = correction(packed)
        count, masks = count + 1, masks + int((outcome.keep != mask[inside].bool()).sum())
        expected = torch.ones_like(rows[0]) if weights is None else weights
        apart = torch.where(outcome.keep, outcome.weights - expected[inside], 0).abs()
        largest = max(largest, float(apart.max()))
    return count, largest, masks


def load(name: str, path: str) -> ModuleType:
    """A module from a file."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def cases(args: argparse.Namespace) -> Iterator[tuple[str, str, Any, ModuleType, tuple]]:
    """Name, dialect, adapter, module, blocks: for every system that was given."""
    if args.verl_3984:
        yield "verl 3984", "verl", verl_block, load("verl_3984", args.verl_3984), PR3984
    if args.slime:
        path = Path(args.slime) / "examples/train_infer_mismatch_helper/mis.py"
        yield "slime mis.py", "slime_mis", slime_mis, load("slime_mis", str(path)), MIS
    for path in args.fireworks:
        module = load(Path(path).stem, path)
        blocks = PR169 if hasattr(module, "ISConfig") else FIREWORKS
        yield f"fw-ai {Path(path).name}", "fireworks", fireworks, module, blocks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verl-3984", metavar="FILE", help="rollout_corr_helper.py of commit 418f964")
    parser.add_argument("--slime", metavar="DIR", help="a checkout")
    parser.add_argument(
        "--fireworks", metavar="FILE", nargs="*", default=[], help="tis.py, importance_sampling.py"
    )
    parser.add_argument("--batches", type=int, default=1000)
    args = parser.parse_args()
    if not any((args.verl_3984, args.slime, args.fireworks)):
        parser.error("expected a system to compare with, got none")
    logging.getLogger("slime_ext").setLevel(logging.ERROR)
    print("| system | block | batches | largest difference of a weight | masks that differ |")
    print("| --- | --- | --- | --- | --- |")
    bad = False
    for name, dialect, adapter, module, blocks in cases(args):
        for block in blocks:
            theirs = functools.partial(adapter, module, block)
            count, largest, masks = compare(dialect, block, theirs, args.batches)
            bad |= masks > 0 or largest > TOLERANCE
            shown = ", ".join(f"{k}: {v}" for k, v in block.items() if v is not None)
            print(f"| {name} | {shown} | {count} | {largest:.1e} | {masks} |", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())

"""Times corrections against each other in one interleaved run: ratios to take home, not absolute
milliseconds.

    python benchmarks/corrections.py [--repeat 9] [--workloads abcd] [--slime DIR]

Configuration T is token weights with a cap of 2; S is sequence weights with a cap, a geometric mask, a veto
and metrics. The floor reads three values and writes one (T) or two (S) per token. Systems that are not
installed are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.others import SYSTEMS
from slime_ext.correction import Correction, Tokens
from slime_ext.metrics import Accumulator, Layout, scalars
from slime_ext.metrics.measure import measure as statistics_of
from slime_ext.ops.segments import Segments
from slime_ext.steps import Reject, Reweight, Truncate, Veto

# Temporaries stay mapped between calls, as under a caching device allocator.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_TOP_PAD_": str(1 << 28)}
GEO = Reject("sequence", "ratio", "mean", 0.999, 1.001)
OURS = {
    "T": Correction(steps=(Reweight("token"), Truncate(2.0))),
    "S": Correction(steps=(Reweight("sequence"), Truncate(2.0), GEO, Veto(low=1e-4))),
}


def lengths(name: str) -> list[int]:
    """Response lengths of a workload: a ragged, b long, c short and many, d one of 131072."""
    torch.manual_seed(0)
    if name == "a":
        return (torch.rand(512).pow(6) * 16200 + 64).int().tolist()
    if name == "c":
        return (torch.rand(4096) * 128 + 64).int().tolist()
    return {"b": [8192] * 64, "d": [131072]}[name]


def workload(name: str) -> SimpleNamespace:
    """The same tokens packed and padded."""
    sizes = lengths(name)
    total, count, longest = sum(sizes), len(sizes), max(sizes)
    proximal = -torch.rand(total) * 2
    behavior = proximal + torch.randn(total) * 2e-3
    where = torch.arange(longest) < torch.tensor(sizes)[:, None]

    def padded(values):
        return torch.zeros(count, longest, dtype=values.dtype).masked_scatter(where, values)

    mask = torch.ones(total, dtype=torch.int32)
    offsets = torch.tensor([0, *sizes]).cumsum(0).int()
    return SimpleNamespace(
        sizes=sizes,
        flat_proximal=proximal,
        flat_behavior=behavior,
        flat_mask=mask,
        offsets=offsets,
        proximal=padded(proximal),
        behavior=padded(behavior),
        mask=where.float(),
    )


def ours(batch, config, observe=False):
    segments = Segments.whole(batch.sizes, batch.flat_mask)
    return OURS[config](Tokens(segments, batch.flat_proximal, batch.flat_behavior), observe=observe)


def ours_full(batch, config):
    segments = Segments.whole(batch.sizes, batch.flat_mask)
    tokens = Tokens(segments, batch.flat_proximal, batch.flat_behavior)
    layout = Layout.of(OURS[config])
    collected = Accumulator(layout)
    outcome = OURS[config](tokens, observe=True)
    collected.add(statistics_of(tokens, outcome, layout))
    return outcome, scalars(collected.reduce()[0])


def floor(batch, config):
    """One pass: three reads, one write; a second write for S."""
    out = torch.addcmul(batch.flat_proximal, batch.flat_behavior, batch.flat_behavior)
    return out if config == "T" else (out, out.clone())


def contenders(slime: str | None) -> dict:
    """name -> {config: function of a workload}."""
    table = {
        "floor": {c: lambda b, c=c: floor(b, c) for c in "TS"},
        "ours, weights and masks": {c: lambda b, c=c: ours(b, c) for c in "TS"},
        "ours, hook metrics": {c: lambda b, c=c: ours(b, c, True) for c in "TS"},
        "ours, all statistics": {c: lambda b, c=c: ours_full(b, c) for c in "TS"},
    }
    for name, load in SYSTEMS.items():
        try:
            table[name] = load()
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
    return table | (mis(slime) if slime else {})


def mis(folder: str) -> dict:
    """slime's example helper from a checkout."""
    sys.path[:0] = [folder, str(Path(folder, "examples", "train_infer_mismatch_helper"))]
    import mis as helper

    common = {
        "tis_lower_bound": 0.5,
        "tis_upper_bound": 2.0,
        "tis_mode": "truncate",
        "tis_batch_normalize": False,
    }
    common |= {"use_tis": True, "rs_lower_bound": 0.999, "rs_upper_bound": 1.001, "rs_veto_threshold": 1e-4}
    token = SimpleNamespace(**common, use_rs=False, tis_level="token", rs_level="geometric")
    sequence = SimpleNamespace(**common, use_rs=True, tis_level="sequence", rs_level="geometric")

    def run(args):
        def body(b):
            lists = (list(x.split(b.sizes)) for x in (b.flat_proximal, b.flat_behavior, b.flat_mask))
            train, rollout, masks = lists
            return helper.compute_mis_weights(
                args, train_log_probs=train, rollout_log_probs=rollout, loss_masks=masks
            )

        return body

    return {"slime mis.py": {"T": run(token), "S": run(sequence)}}


def measure(bodies: dict, batch, repeat: int) -> dict[str, float]:
    """Median milliseconds of processor time (one thread), interleaved, the order turned every other time."""
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for i in range(repeat + 1):
        order = list(bodies) if i % 2 else list(bodies)[::-1]
        for name in order:
            if i > 3 and statistics.median(times[name]) > 250:
                continue
            begin = time.process_time()
            bodies[name](batch)
            if i:
                times[name].append((time.process_time() - begin) * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--workloads", default="abcd")
    parser.add_argument("--slime", help="a checkout, for its mis.py")
    args = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in ALLOCATOR.items()):
        sys.exit(
            subprocess.run([sys.executable, *sys.argv], env=os.environ | ALLOCATOR, check=False).returncode
        )
    torch.set_num_threads(1)
    table = contenders(args.slime)
    batches = {name: workload(name) for name in args.workloads}
    for config in "TS":
        bodies = {name: body[config] for name, body in table.items()}
        found = {name: measure(bodies, batch, args.repeat) for name, batch in batches.items()}
        shown = Table(title=f"configuration {config}: ms, and how many times ours with hook metrics")
        for column in ("", *batches):
            shown.add_column(column)
        for name in bodies:
            base = {w: found[w]["ours, hook metrics"] for w in batches}
            shown.add_row(name, *(f"{found[w][name]:.3g} ({found[w][name] / base[w]:.2f}x)" for w in batches))
        Console(width=110).print(shown)


if __name__ == "__main__":
    main()

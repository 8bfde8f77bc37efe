"""How often healthy runs leave the 95% intervals of the identities that two honest policies satisfy.

python -m benchmarks.faults honest [--count N]

Tokens are drawn from the sampler's own distribution, so the mean ratio is 1 over a run, in each rollout and
at each place of the response, whatever the trainer's weights. The runs are small and differ in lag, learning
rate, certainty, arithmetic, turns and experts.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.mechanisms import Toy, start
from benchmarks.faults.model import BF16, FP32, How, Shape
from benchmarks.faults.world import World, write
from slime_ext.tools.analysis.detectors.shared.identities import ratios, record_of
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.pipeline import collect
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import collectors_of

BOUND = 1.96  # standard errors of a 95% interval
DISTANCES = (0.0, 5e-3, 5e-2)  # least k3 of a row of the table
RUN, ROLLOUT, PLACE = "run", "rollout", "place in the response"


def world(number: int) -> World:
    """Returns a healthy run; its policies are as far apart as its lag makes them."""
    g = torch.Generator().manual_seed(40_000 + number)

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=g))]

    shape = Shape(
        vocabulary=64,
        layers=1,
        width=32,
        inner=48,
        confidence=one_of(2.6, 5.0, 8.0),
        experts=one_of(0, 0, 0, 8),
    )
    turns = one_of(1, 1, 3)
    return World(
        seed=40_000 + number,
        shape=shape,
        rollouts=4,
        samples=one_of(24, 32),
        length=36 if turns > 1 else one_of(16, 24, 32),
        learning=one_of(1e-3, 4e-3, 1e-2),
        late=one_of(0, 1, 2),
        text=Toy(64, 6),
        turns=turns,
        trainer=How(dtype=one_of(FP32, BF16)),
        routes=shape.experts > 0,
        replays_routes=shape.experts > 0,
    )


def diagnosis_of(folder: Path) -> Diagnosis:
    """Returns the sums of a run."""
    request = Request((str(folder),), presets=())
    return collect(request.files().jobs, collectors_of(request)).collectors["diagnosis"]


def distances(d: Diagnosis) -> Iterator[tuple[str, float]]:
    """Yields how many standard errors each mean ratio of a run is from 1, and the part that it is of."""
    for ratio in ratios(d):
        if not ratio.where:
            yield RUN, ratio.mean.z
        elif ratio.where.startswith(ROLLOUT):
            yield ROLLOUT, ratio.mean.z
        elif ratio.where.startswith("token"):
            yield PLACE, ratio.mean.z


def table(count: int) -> str:
    """Returns the shares outside 95% intervals by part and by the distance of the policies."""
    zs: dict[tuple[int, str], list[float]] = defaultdict(list)
    altered = 0
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as folder:
            run = world(number)
            d = diagnosis_of(write(run, Path(folder), [start(run)]))
        altered += record_of(d).side == "altered"
        distance = sum((d.numbers().k3 or 0.0) >= least for least in DISTANCES) - 1
        for part, z in distances(d):
            zs[distance, part].append(z)
    heads = "| k3, nats | mean ratio over | intervals | below | above | outside | furthest |"
    lines = [heads, f"|---|---|{'---:|' * 5}"]
    for (distance, part), values in sorted(zs.items()):
        low, high = (sum(sign * z > BOUND for z in values) / len(values) for sign in (-1, 1))
        furthest = max(values, key=abs)
        lines.append(
            f"| from {DISTANCES[distance]:g} | {part} | {len(values)} | {low:.1%} | {high:.1%} | "
            f"{low + high:.1%} | {furthest:.1f} errors |"
        )
    return "\n".join([*lines, "", f"{altered} of {count} runs are called altered."])

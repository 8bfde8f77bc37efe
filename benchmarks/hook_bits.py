"""Records the bits of 1,000 random hook calls, so that two commits can be compared.

    python -m benchmarks.hook_bits before.json                      # on one commit
    python -m benchmarks.hook_bits after.json                       # on another
    python -m benchmarks.hook_bits --compare before.json after.json

Each call gives lists to the hook and gets lists back, as slime does. The values are float32, in responses of
0 to 300 tokens with several turns and advantages of both signs. A few log-probs are NaN, infinite or above 0.
The calls take turns among all presets, slime's own three functions, and a few corrections with keys that no
preset has. Each call is a separate optimizer step. ``--compare`` exits with 1 if a call differs.

Compare only records of the same machine and the same PyTorch, because rounding differs between builds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import random
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_ext import presets, tis
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.tokens import Head
from slime_ext.errors import SlimeExtError
from slime_ext.host import step_metrics
from slime_ext.host.configured import setup_for
from slime_ext.hosts.contract import SLIME_FUNCTIONS

CALLS = 1000
SINCE = ("off_policy/log_ratio_max",)  # metrics that older commits do not record
HEAD = 128  # tokens of each head: those of the preset that centers
PARTS = ("loss", "gradient", "masks", "metrics")
MAPPINGS: dict[str, dict[str, Any]] = {  # beside the presets: keys and steps that none of them has
    "normalize tokens": {"steps": ["reweight", "truncate", "normalize"]},
    "normalize sequences": {
        "steps": [{"reweight": {"level": "sequence"}}, "truncate", {"normalize": {"level": "sequence"}}]
    },
    "all masks, kept": {"preset": "icepop", "mask_scope": "all", "denominator": "kept"},
    "terms on the host's loss": {
        "preset": "geo_rs",
        "terms": ["squared_log_ratio", {"reverse_k3": {"coefficient": 0.5}}],
    },
    "dual clip": {"steps": ["reweight", "truncate"], "surrogate": {"dual_clip": {"anchor": "proximal"}}},
    "sapo": {"surrogate": "sapo"},
    "uncapped sequences": {"steps": [{"reweight": {"level": "sequence"}}]},
    "prefix means": {
        "steps": [{"prefix_reweight": {"aggregate": "mean"}}, "clip", {"reject": {"unit": "turn", "high": 2}}]
    },
}
NAMES = (*SLIME_FUNCTIONS, *presets.PRESETS, *MAPPINGS)


def random_call(seed: int) -> dict[str, Any]:
    """Returns the keywords of one hook call.

    The target's log-probs have a gradient, and ``pg_loss`` is PPO's unclipped loss.
    """
    rng = random.Random(seed)
    lengths = [rng.choice((1, rng.randint(0, 12), rng.randint(13, 300))) for _ in range(rng.randint(1, 6))]
    samples = [_sample(rng, length) for length in lengths]
    columns = {key: [torch.tensor(sample[key]) for sample in samples] for key in samples[0]}
    target = [values.requires_grad_() for values in columns["target"]]
    masks = [torch.tensor(sample["mask"], dtype=torch.int32) for sample in samples]
    policy_loss = [
        torch.where(mask > 0, -advantages * (log_probs - proximal).exp(), garbage)
        for mask, advantages, log_probs, proximal, garbage in zip(
            masks, columns["advantages"], target, columns["proximal"], columns["garbage"], strict=True
        )
    ]
    return {
        "pg_loss": torch.cat(policy_loss),
        "train_log_probs": columns["proximal"],
        "rollout_log_probs": columns["behavior"],
        "loss_masks": masks,
        "total_lengths": [length + rng.randint(1, 50) for length in lengths],
        "response_lengths": lengths,
        "cur_log_probs": target,
        "advantages": columns["advantages"],
        "head": _head(seed, sum(lengths)),
    }


def _head(seed: int, tokens: int) -> Head:
    """Returns a head at each token, from policies that are 0.5 nats apart."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 2 * HEAD, generator=draw)
    other = logits + 0.5 * torch.randn(logits.shape, generator=draw)
    sampler, trainer = (values.log_softmax(1)[:, :HEAD] for values in (logits, other))
    return Head(sampler, trainer.requires_grad_())


def _sample(rng: random.Random, length: int) -> dict[str, list[float]]:
    """Draws one response from a near or a far sampler. Half of the responses have a few broken log-probs."""
    spread, is_broken = rng.choice((1e-3, 0.03, 0.5, 2.0)), rng.random() < 0.5
    advantage, varies = rng.choice((-1.3, -0.2, 0.0, 0.7, 2.0)), rng.random() < 0.3
    mask = _mask(rng, length)
    columns: dict[str, list[float]] = {
        key: [] for key in ("proximal", "behavior", "target", "advantages", "garbage")
    }
    for is_sampled in mask:
        proximal = -rng.expovariate(1.0)
        behavior = min(proximal + rng.gauss(0, spread), 0.0)
        target = proximal + rng.gauss(0, spread / 3)
        if is_broken and rng.random() < 0.02:
            behavior = rng.choice((math.nan, math.inf, -math.inf, 0.7, proximal - 120.0))
        values = {"proximal": proximal, "behavior": behavior, "target": target}
        values |= {"advantages": advantage + (rng.gauss(0, 0.3) if varies else 0.0), "garbage": 0.0}
        if not is_sampled and is_broken and rng.random() < 0.3:
            values = {key: rng.choice((math.nan, math.inf, -math.inf, 1e30, -3.0)) for key in values}
        for key, value in values.items():
            columns[key].append(value)
    return columns | {"mask": mask}


def _mask(rng: random.Random, length: int) -> list[float]:
    """Draws a mask of sampled runs between tool output. One mask in ten has no sampled token."""
    if rng.random() < 0.1:
        return [0.0] * length
    mask: list[float] = []
    is_sampled = rng.random() < 0.8
    while len(mask) < length:
        mask += [float(is_sampled)] * rng.randint(1, 60)
        is_sampled = not is_sampled
    return mask[:length]


def arguments(name: str) -> SimpleNamespace:
    """Returns slime's arguments for a preset, one of slime's functions, or a name of ``MAPPINGS``."""
    args = SimpleNamespace(
        use_tis=True, tis_clip=2.0, tis_clip_low=0.5, eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=None
    )
    if name in MAPPINGS:
        args.slime_ext = MAPPINGS[name]
    args.custom_generate_function_path = "slime_ext.host.generate"
    args.custom_tis_function_path = f"slime_ext.tis.{'correct' if name in MAPPINGS else name}"
    return args


def call_digests(name: str, seed: int) -> dict[str, str]:
    """Returns the digest of each of ``PARTS`` of a call, or of its error message."""
    args, call = arguments(name), random_call(seed)
    function = getattr(tis, args.custom_tis_function_path.rpartition(".")[2])
    layout = MetricsLayout.of(setup_for(args).hook_correction)
    try:
        with step_metrics.under_way(step_metrics.OptimizerStep(layout)) as step:
            loss, masks, channel = function(args, **call)
            scalars, curves = step.reduce()
            scalars = {name: value for name, value in scalars.items() if name not in SINCE}
    except SlimeExtError as error:
        return dict.fromkeys(PARTS, f"{type(error).__name__}: {error}")
    # The host multiplies by the masks that came back; a masked token may hold anything.
    counted = torch.where(torch.cat(list(masks)) > 0, loss, 0).sum()
    read = [*call["cur_log_probs"], call["head"].trainer]
    *gradients, of_head = torch.autograd.grad(counted, read, allow_unused=True)
    gradients += [] if of_head is None else [of_head]
    metrics = [*_bytes_of(channel), *_bytes_of(scalars), *_bytes_of(curves)]
    values = [_bits(loss)], map(_bits, gradients), map(_bits, masks), metrics
    return {part: _digest(pieces) for part, pieces in zip(PARTS, values, strict=True)}


def _bits(values: Tensor | None) -> bytes:
    """Returns the bits of a tensor, with the same bits for every NaN."""
    if values is None:
        return b"none"
    values = values.detach().contiguous()
    if values.is_floating_point():
        values = torch.where(values.isnan(), torch.full_like(values, math.nan), values)
    return str(tuple(values.shape)).encode() + values.numpy().tobytes()


def _bytes_of(values: Mapping[str, Tensor | float]) -> Iterable[bytes]:
    for key, value in values.items():
        yield key.encode()
        yield _bits(value) if isinstance(value, Tensor) else struct.pack("<d", value)


def _digest(pieces: Iterable[bytes]) -> str:
    hashed = hashlib.sha256()
    for piece in pieces:
        hashed.update(piece)
    return hashed.hexdigest()[:16]


def record(calls: int = CALLS) -> list[dict[str, str]]:
    """Returns the digests of each call, with the name of its correction."""
    torch.set_num_threads(1)
    names = [NAMES[seed % len(NAMES)] for seed in range(calls)]
    return [{"name": name} | call_digests(name, seed) for seed, name in enumerate(names)]


def differences(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns what differs between two records, by the name of the correction."""
    calls = Counter(row["name"] for row in before)
    changed: dict[str, list[str]] = {}
    for one, other in zip(before, after, strict=True):
        if one["name"] != other["name"]:
            return {"all": "the records have different calls"}
        if parts := [part for part in PARTS if one[part] != other[part]]:
            changed.setdefault(one["name"], []).append("+".join(parts))
    return {name: f"{len(rows)} of {calls[name]} calls ({_parts(rows)})" for name, rows in changed.items()}


def _parts(rows: Sequence[str]) -> str:
    return ", ".join(f"{parts} in {count}" for parts, count in Counter(rows).most_common())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="file to write; two files beside --compare")
    parser.add_argument("--compare", action="store_true", help="print which corrections differ")
    asked = parser.parse_args(argv)
    if len(asked.files) != (2 if asked.compare else 1):
        parser.error("expected one file to write, or --compare and two files")
    if not asked.compare:
        logging.getLogger("slime_ext").setLevel(logging.ERROR)  # coupled steps say that they lack a plan
        asked.files[0].write_text(json.dumps(record(), indent=0))
        return 0
    before, after = (json.loads(file.read_text()) for file in asked.files)
    if len(before) != len(after):
        parser.error(f"expected records of as many calls, got {len(before)} and {len(after)}")
    changed = differences(before, after)
    for name, what in changed.items():
        print(f"{name}: {what}")
    print(f"{len(changed)} of {len({row['name'] for row in before})} corrections differ")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())

"""Compares a peer's loss with that of its converted settings, inside the divisor of slime."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_ext import tis
from slime_ext.errors import ConfigError
from slime_ext.tools.convert import CONVERTED, read
from slime_ext.tools.convert.block import Reading
from tests.adapters.padded import Batch, of
from tests.test_tis import arguments, as_slime_calls
from tests.tools.convert.common import batch_of

EPS = 0.2  # of every system's PPO clip by default, and of slime's


@dataclass
class Comparison:
    """What a comparison of random settings found."""

    blocks: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    losses: int = 0
    largest: float = 0.0
    differences: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)


def batch(seed: int, *, far: bool = False) -> tuple[Batch, list[dict[str, Any]]]:
    """Returns a batch padded with 0, and its samples.

    Each has a response token, because slime counts one even where there is none.

    Args:
        far: whether some log-ratios lie beyond the clamp of +-20 that most systems have.
    """
    samples = [s for i in (0, 1) for s in batch_of(2 * seed + i, far=far) if sum(s["mask"])]
    if not samples:
        return batch(seed + 1, far=far)
    rows = of(samples)
    for name in ("behavior", "proximal", "advantages"):
        setattr(rows, name, torch.where(rows.mask != 0, getattr(rows, name), 0.0))
    rows.target = torch.where(rows.mask != 0, rows.target.detach(), 0.0).requires_grad_()
    return rows, samples


def flags_of(reading: Reading, *, per_token: bool) -> SimpleNamespace:
    """Returns slime's args with converted settings. One per run, as in slime: a hook is built once."""
    flags = {"calculate_per_token_loss": per_token, "slime_ext": reading.mapping}
    return arguments(**flags | {k: v for k, v in reading.args.items() if k != "advantage_estimator"})


def ours(
    args: SimpleNamespace, reading: Reading, rows: Batch, samples: list[dict[str, Any]]
) -> tuple[Tensor, Tensor]:
    """Returns the loss of an optimizer step of slime with converted settings, and its gradient [B, T]."""
    lengths = [len(s["mask"]) for s in samples]
    target = torch.cat([rows.target[i, :n] for i, n in enumerate(lengths)]).detach().requires_grad_()
    call = as_slime_calls(samples, cur_log_probs=list(target.split(lengths)))
    packed = SimpleNamespace(
        proximal=torch.cat(call["train_log_probs"]),
        advantages=torch.cat(call["advantages"]),
        mask=torch.cat(call["loss_masks"]),
        lengths=lengths,
    )
    call["pg_loss"] = host_loss(reading.args, target, packed)
    corrected, masks, _ = tis.correct(args, **call)
    sums = [(x * m).sum() for x, m in zip(corrected.split(lengths), masks, strict=True)]
    counts = [float(sum(s["mask"])) for s in samples]
    if args.calculate_per_token_loss:
        total = sum(sums) / sum(counts)
    else:
        total = sum(x / n for x, n in zip(sums, counts, strict=True)) / len(sums)
    (slope,) = torch.autograd.grad(total, target) if total.requires_grad else (torch.zeros_like(target),)
    gradient = torch.zeros_like(rows.mask)
    for row, values in enumerate(slope.split(lengths)):
        gradient[row, : lengths[row]] = values
    return total.detach(), torch.where(rows.mask != 0, gradient, 0)


def host_loss(flags: Any, target: Tensor, packed: SimpleNamespace) -> Tensor:
    """Returns slime's loss of each token under the flags that ``convert`` asks for."""
    low, high = flags.get("eps_clip", EPS), flags.get("eps_clip_high", EPS)
    log_ratio, advantages = target - packed.proximal, packed.advantages
    if flags.get("advantage_estimator") == "gspo":
        parts = zip(log_ratio.split(packed.lengths), packed.mask.split(packed.lengths), strict=True)
        means = [((x * m).sum() / m.sum()).expand(len(x)) for x, m in parts]
        log_ratio = torch.cat(means).detach() + target - target.detach()
    ratio = log_ratio.exp()
    if flags.get("advantage_estimator") == "cispo":
        return -ratio.clamp(1 - low, 1 + high).detach() * advantages * target
    clipped = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if cap := flags.get("eps_clip_c"):
        clipped = torch.where(advantages < 0, torch.minimum(clipped, -cap * advantages), clipped)
    return clipped


def compare(peer: ModuleType, version: str, count: int, *, seeds: int = 3, start: int = 0) -> Comparison:
    """Compares ``count`` random blocks of a release on ``seeds`` batches each."""
    result, rng = Comparison(), random.Random(f"{peer.NAME} {version} {start}")
    for _ in range(count):
        settings = peer.block(rng, version)
        result.blocks += 1
        try:
            reading = read(peer.NAME, settings)
        except ConfigError as error:
            result.refused += 1
            result.refusals.append(str(error))
            continue
        result.unnamed += [f"{version} {settings}: {key}" for key in dropped(peer, settings, reading)]
        args = flags_of(reading, per_token=peer.per_token(settings))
        far = getattr(peer, "clamps_as_we_do", lambda _: True)(settings)
        for i, seed in enumerate(rng.randrange(10**6) for _ in range(seeds)):
            rows, samples = batch(seed, far=far and i % 2 == 0)
            theirs = peer.loss(settings, rows, version)
            (slope,) = torch.autograd.grad(theirs, rows.target)
            slope = torch.where(rows.mask != 0, slope, 0)
            total, gradient = ours(args, reading, rows, samples)
            size = max(1.0, float(slope.abs().max()))
            apart = float((slope - gradient).abs().max()) / size
            if getattr(peer, "has_our_value", lambda _: True)(settings):
                apart = max(apart, float((theirs.detach() - total).abs()) / max(size, float(total.abs())))
            result.losses += 1
            result.largest = max(result.largest, apart)
            if not apart < peer.CLOSE:
                result.differences.append(f"{version} {settings}, batch {seed}: {apart:.2g}")
    return result


def dropped(peer: ModuleType, settings: dict[str, Any], reading: Reading) -> list[str]:
    """Returns the keys, dotted, without which the translation and its notes would be the same.

    A key with the system's default may be left out, and so may a key of a mapping that a note names.
    """
    keys, nested = [], getattr(peer, "NESTED", {})
    for path, value in paths(settings):
        defaults = nested[path[-2]] if len(path) > 1 else CONVERTED[peer.NAME].defaults
        is_named = any(
            re.search(rf"ignores [^:]*\b{parent}\b(?!\.)", n) for n in reading.notes for parent in path[:-1]
        )
        synonyms = getattr(peer, "synonyms", lambda _: {})(settings)
        means_the_same = synonyms.get(path[-1], (defaults[path[-1]],))
        if value is None or is_named or value in means_the_same:
            continue
        try:
            keys += [".".join(path)] if read(peer.NAME, without(settings, path)) == reading else []
        except ConfigError:
            pass  # without the key the block has no translation, so it was read
    return keys


def paths(settings: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each key that holds no mapping, as a path."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from (((key, *path), inner) for path, inner in paths(value))
        else:
            yield (key,), value


def without(settings: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Returns settings without one key."""
    first, *rest = path
    if not rest:
        return {key: value for key, value in settings.items() if key != first}
    return {**settings, first: without(settings[first], tuple(rest))}

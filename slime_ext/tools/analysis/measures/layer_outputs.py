"""Layer outputs of trainer and sampler over the same tokens -> how far apart they are after each layer.

A run's folder may hold ``layers/trainer`` and ``layers/sampler``. Read are slime's dumps
(SLIME_LAYERWISE_ALIGNMENT_DUMP_DIR: ``layers`` by number, ``input_ids``, ``cu_seqlens``; slime/backends/
megatron_utils/alignment/layerwise_alignment.py at 624b824), SGLang's (--debug-tensor-dump-output-folder: the
residual stream after layer i is the second output of layer i + 1's input_layernorm, or of the last norm),
and those of SGLang's dumper, which miles uses on both sides (--dumper-enable: one file
``...name=...layers.<i>...pt`` for each output).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_ext.errors import DataError
from slime_ext.tools.analysis.readers.unpickle import load_plain

SIDES = ("trainer", "sampler")
RESIDUAL = re.compile(r"model\.layers\.(\d+)\.input_layernorm")
DUMPED = re.compile(r"name=\S*?layers\.(\d+)(?:\.output)?(?:___|\.pt)")
IDS = re.compile(r"name=\S*?input_ids")
MOST_FILES = 64  # of a side; more tell nothing new


class LayerDistance(NamedTuple):
    """Median over tokens of |trainer - sampler| / |trainer| after a layer, and the unit roundoff of the
    coarser side's dtype."""

    layer: int
    distance: float
    roundoff: float


Outputs = dict[int, Tensor]  # layer -> [tokens, width]


def layer_distances(folder: Path) -> tuple[LayerDistance, ...]:
    """The distance after each layer that both sides of a run's folder hold; empty where there is nothing to
    compare."""
    sides = [_by_tokens(folder / "layers" / side) for side in SIDES]
    found: dict[int, list[Tensor]] = {}
    roundoff: dict[int, float] = {}
    for ids, mine in sides[0].items():
        theirs = sides[1].get(ids, {})
        for layer in mine.keys() & theirs.keys():
            a, b = mine[layer], theirs[layer]
            if a.shape != b.shape:
                continue
            roundoff[layer] = max(torch.finfo(x.dtype).eps / 2 for x in (a, b))
            a, b = a.float(), b.float()
            found.setdefault(layer, []).append((a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-30))
    return tuple(
        LayerDistance(layer, float(torch.cat(found[layer]).median()), roundoff[layer])
        for layer in sorted(found)
    )


def _by_tokens(folder: Path) -> dict[tuple[int, ...], Outputs]:
    """Sequence of token ids -> its layer outputs. Passes over single tokens, which decode, are left out."""
    found: dict[tuple[int, ...], Outputs] = {}
    for ids, lengths, outputs in _passes(folder):
        begin = 0
        for length in lengths:
            cut = slice(begin, begin + length)
            begin += length
            if length > 1:
                key = tuple(ids[cut].tolist())
                found.setdefault(key, {}).update({i: x[cut] for i, x in outputs.items()})
    return found


def _passes(folder: Path) -> Iterator[tuple[Tensor, list[int], Outputs]]:
    """Token ids [T], lengths of their sequences and layer outputs of each forward pass in a folder."""
    paths = sorted(folder.rglob("*.pt"))[: MOST_FILES * MOST_FILES]
    apart = [path for path in paths if "name=" in path.name]
    if apart:
        yield from _of_dumper(apart)
        return
    for path in paths[:MOST_FILES]:
        try:
            yield _of_pass(load_plain(path))
        except (DataError, KeyError, TypeError, ValueError, AttributeError, RuntimeError):
            continue  # another kind of file


def _of_pass(found: Mapping[str, Any]) -> tuple[Tensor, list[int], Outputs]:
    if "layers" in found:
        ids = found["input_ids"].flatten()
        bounds = found.get("cu_seqlens")
        lengths = [len(ids)] if bounds is None else bounds.long().diff().tolist()
        return ids, lengths, {int(i): _flat(x) for i, x in found["layers"].items()}
    ids = found["model.forward_batch_info.input_ids"].flatten()
    lengths = [int(n) for n in found["model.forward_batch_info.seq_lens"].flatten()]
    if sum(lengths) != len(ids):
        raise ValueError("a pass that decodes")
    residuals = {int(m[1]) - 1: x for name, x in found.items() if (m := RESIDUAL.fullmatch(name))}
    residuals[max(residuals, default=-1) + 1] = found["model.norm"]
    outputs = {i: _flat(x[1]) for i, x in residuals.items() if isinstance(x, (list, tuple)) and len(x) == 2}
    return ids, lengths, outputs


def _of_dumper(paths: list[Path]) -> Iterator[tuple[Tensor, list[int], Outputs]]:
    steps: dict[tuple[Path, str], list[Path]] = {}
    for path in paths:
        step = re.search(r"step=(\d+)", path.name)
        steps.setdefault((path.parent, step[1] if step else "0"), []).append(path)
    for files in list(steps.values())[:MOST_FILES]:
        ids, outputs = None, {}
        for path in files:
            layer = DUMPED.search(path.name)
            if not layer and not IDS.search(path.name):
                continue
            try:
                value = load_plain(path)["value"]
                value = value[0] if isinstance(value, (list, tuple)) else value
                if layer:
                    outputs[int(layer[1])] = _flat(value)
                else:
                    ids = value.flatten()
            except (DataError, KeyError, TypeError, AttributeError, IndexError, RuntimeError):
                continue
        if ids is not None and outputs:
            yield ids, [len(ids)], outputs


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])

"""Measures how far trainer and sampler are apart after each layer, over the same tokens.

A run's folder may hold ``layers/trainer`` and ``layers/sampler``, in one of three formats: slime's dumps
(SLIME_LAYERWISE_ALIGNMENT_DUMP_DIR: ``layers`` by number, ``input_ids``, ``cu_seqlens``; slime/backends/
megatron_utils/alignment/layerwise_alignment.py at 624b824); SGLang's dumps
(--debug-tensor-dump-output-folder: the residual stream after layer i is the second output of the
input_layernorm of layer i + 1, or of the last norm); and dumps of SGLang's dumper, which miles uses on both
sides (--dumper-enable: one file ``...name=...layers.<i>...pt`` for each output).
"""

from __future__ import annotations

import math
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
MOST_FILES = 64  # forward passes of a side that are read, which are enough


class LayerDistance(NamedTuple):
    """The median over tokens of |trainer - sampler| / |trainer| after a layer.

    ``roundoff`` is the unit roundoff of the coarser side's dtype, and ``error`` the standard error of the
    median over sequences.
    """

    layer: int
    distance: float
    roundoff: float
    error: float = 0.0


Outputs = dict[int, Tensor]  # layer -> [tokens, width]


def layer_distances(folder: Path) -> tuple[LayerDistance, ...]:
    """Returns the distance after each layer that both sides of a run's folder hold."""
    sides = [_by_tokens(folder / "layers" / side) for side in SIDES]
    distances: dict[int, list[Tensor]] = {}
    roundoff: dict[int, float] = {}
    for ids, trainer in sides[0].items():
        sampler = sides[1].get(ids, {})
        for layer in trainer.keys() & sampler.keys():
            a, b = trainer[layer], sampler[layer]
            if a.shape != b.shape or not (a.is_floating_point() and b.is_floating_point()):
                continue
            roundoff[layer] = max(torch.finfo(x.dtype).eps / 2 for x in (a, b))
            a, b = a.float(), b.float()
            distances.setdefault(layer, []).append((a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-30))
    return tuple(
        LayerDistance(layer, distance, roundoff[layer], error)
        for layer, (distance, error) in sorted((i, _median(x)) for i, x in distances.items())
    )


def _median(of_sequences: list[Tensor]) -> tuple[float, float]:
    """Returns the median over all tokens, and its standard error from the medians of the sequences."""
    medians = torch.stack([tokens.median() for tokens in of_sequences])
    error = float(medians.std()) / math.sqrt(len(medians)) if len(medians) > 1 else 0.0
    return float(torch.cat(of_sequences).median()), error


def _by_tokens(folder: Path) -> dict[tuple[int, ...], Outputs]:
    """Returns the layer outputs of each sequence of token ids, without passes that decode one token."""
    outputs_of: dict[tuple[int, ...], Outputs] = {}
    for ids, lengths, outputs in _passes(folder):
        begin = 0
        for length in lengths:
            cut = slice(begin, begin + length)
            begin += length
            if length > 1:
                key = tuple(ids[cut].tolist())
                outputs_of.setdefault(key, {}).update({i: x[cut] for i, x in outputs.items()})
    return outputs_of


def _passes(folder: Path) -> Iterator[tuple[Tensor, list[int], Outputs]]:
    """Yields token ids [T], lengths of sequences and layer outputs of each forward pass in a folder."""
    paths = sorted(folder.rglob("*.pt"))[: MOST_FILES * MOST_FILES]
    single_outputs = [path for path in paths if "name=" in path.name]
    if single_outputs:
        yield from _of_dumper(single_outputs)
        return
    for path in paths[:MOST_FILES]:
        try:
            yield _of_pass(load_plain(path, tensors=True))
        except (DataError, KeyError, TypeError, ValueError, AttributeError, RuntimeError):
            continue  # another kind of file


def _of_pass(content: Mapping[str, Any]) -> tuple[Tensor, list[int], Outputs]:
    if "layers" in content:
        ids = content["input_ids"].flatten()
        bounds = content.get("cu_seqlens")
        lengths = [len(ids)] if bounds is None else bounds.long().diff().tolist()
        return ids, lengths, {int(i): _flat(x) for i, x in content["layers"].items()}
    ids = content["model.forward_batch_info.input_ids"].flatten()
    lengths = [int(n) for n in content["model.forward_batch_info.seq_lens"].flatten()]
    if sum(lengths) != len(ids):
        raise ValueError("a pass that decodes")
    residuals = {int(m[1]) - 1: x for name, x in content.items() if (m := RESIDUAL.fullmatch(name))}
    residuals[max(residuals, default=-1) + 1] = content["model.norm"]
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
                value = load_plain(path, tensors=True)["value"]
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

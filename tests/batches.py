"""Oracle batches as packed tensors."""

from __future__ import annotations

import math

import torch

from slime_ext.core.state import Head, Tokens
from slime_ext.ops.segments import Segments
from tests import oracle

TOP_K = 128  # of the presets that center
FIELDS = ("proximal", "behavior", "target", "advantage", "host_loss")


def flat(batch, key, dtype=torch.float64):
    return torch.tensor([x for s in batch for x in s[key]], dtype=dtype)


def head(batch, dtype=torch.float64):
    """The oracle's heads, filled up with absent tokens."""
    pairs = [pair for s in batch for pair in oracle.heads(s)]
    rows = ([pair[side] + [-math.inf] * (TOP_K - len(pair[side])) for pair in pairs] for side in (0, 1))
    return Head(*(torch.tensor(values, dtype=dtype).reshape(-1, TOP_K) for values in rows))


def tokens(batch, dtype=torch.float64):
    segments = Segments.whole([len(s["mask"]) for s in batch], flat(batch, "mask"))
    values = {key: flat(batch, key, dtype) for key in FIELDS}
    values["target"].requires_grad_()
    of_tokens = (values[key] for key in ("proximal", "behavior", "target", "advantage"))
    return Tokens(segments, *of_tokens, head=head(batch, dtype)), values["host_loss"]


def flat_call(batch, **changes):
    """An oracle batch as the arguments of ``slime_ext.correct``."""
    packed, loss = tokens(batch)
    return {
        "loss": loss,
        "behavior": packed.behavior,
        "proximal": packed.proximal,
        "lengths": [len(s["mask"]) for s in batch],
        "mask": packed.segments.mask,
        "target": packed.target,
        "advantages": packed.advantages,
        "head": (packed.head.sampler, packed.head.trainer),
    } | changes

"""Oracle batches as packed tensors."""

from __future__ import annotations

import torch

from slime_ext.core.state import Tokens
from slime_ext.ops.segments import Segments

FIELDS = ("proximal", "behavior", "target", "advantage", "host_loss")


def flat(batch, key, dtype=torch.float64):
    return torch.tensor([x for s in batch for x in s[key]], dtype=dtype)


def tokens(batch, dtype=torch.float64):
    segments = Segments.whole([len(s["mask"]) for s in batch], flat(batch, "mask"))
    values = {key: flat(batch, key, dtype) for key in FIELDS}
    values["target"].requires_grad_()
    return Tokens(
        segments, values["proximal"], values["behavior"], values["target"], values["advantage"]
    ), values["host_loss"]


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
    } | changes

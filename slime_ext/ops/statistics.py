"""The statistics that steps ask for, computed together: one pass over the tokens, one all-reduce, whatever
the steps are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slime_ext.ops.segments import Segments, identity

Unit = Literal["token", "turn", "sequence"]


class Over(NamedTuple):
    """By how much ``name`` exceeds ``limit``: its sum is 0 where no token does, and that is all it tells."""

    name: str
    limit: float


class Need(NamedTuple):
    """One statistic: ``aggregate`` of the per-token quantity ``name`` over the response tokens of each
    ``unit``.

    ``slots`` is the table [S, slots] of minima per part of a sequence that ``Segments.prefix_min`` reads.
    """

    aggregate: Literal["sum", "max", "slots"]
    unit: Literal["turn", "sequence"]
    name: str | Over


def tabulate(
    needs: Iterable[Need], value_of: Callable[[str | Over], Tensor], segments: Segments
) -> dict[Need, Tensor]:
    """Every need as one tensor over its units, after at most one call of ``segments.all_sum``.

    Args:
        needs: what to compute; duplicates cost nothing.
        value_of: the per-token quantity [T] of a name, 0 at masked tokens.

    Returns:
        need -> [S] or [U] float64 (``slots``: [S, slots]). Maxima of a unit without response tokens are -inf.
    """
    wanted = list(dict.fromkeys(needs))
    totals = [n for n in wanted if n.aggregate == "sum" and n.unit == "sequence"]
    others = [n for n in wanted if n not in totals]
    shares = [_share(n, value_of(n.name), segments) for n in others]
    if totals:
        shares.append(segments.grid.totals([_partial(n.name, value_of, segments) for n in totals]).t())
    shares = _all_sum(shares, segments)
    table = {n: _finish(n, share) for n, share in zip(others, shares, strict=False)}
    return table | {n: shares[-1][:, k] for k, n in enumerate(totals)}


def _partial(name: str | Over, value_of: Callable[[str | Over], Tensor], segments: Segments) -> Tensor:
    if isinstance(name, Over):  # no token of a block exceeds the limit where its largest does not
        return (segments.grid.partial(value_of(name.name), "amax") - name.limit).clamp_min_(0)
    return segments.grid.partial(value_of(name))


def _share(need: Need, values: Tensor, segments: Segments) -> Tensor:
    if need.aggregate == "sum":
        return segments.turn_sum_shares(values)
    if need.unit == "turn":
        return segments.turn_max_shares(values)
    signed = values if need.aggregate == "max" else -values
    return segments.max_shares(torch.where(segments.mask, signed, -torch.inf))


def _finish(need: Need, share: Tensor) -> Tensor:
    if need.aggregate in ("sum", "slots"):
        return share
    if need.unit == "turn":
        share = torch.where(share[..., 1] > 0, share[..., 0], -torch.inf)
    return share.amax(1)


def _all_sum(shares: list[Tensor], segments: Segments) -> list[Tensor]:
    if segments.all_sum is identity or not shares:
        return shares
    flat = segments.all_sum(torch.cat([share.reshape(-1) for share in shares]))
    parts = flat.split([share.numel() for share in shares])
    return [part.view(share.shape) for part, share in zip(parts, shares, strict=True)]

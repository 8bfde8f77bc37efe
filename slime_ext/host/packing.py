"""slime's lists and zig-zag context-parallel slices <-> one flat tensor per quantity."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TypeVar

import torch
from torch import Tensor

from slime_ext.errors import ConfigError, DataError
from slime_ext.host.contract import CARRY, HookCall, check_lengths
from slime_ext.ops.segments import AllSum, Segments, identity

HIGHEST = 0.01  # nats; above it rounding is no explanation for a log-prob over 0

Sliceable = TypeVar("Sliceable", Tensor, list)


@dataclass(frozen=True)
class Parallel:
    """This rank's place among those that share sequences."""

    rank: int = 0
    size: int = 1
    all_sum: AllSum = identity


ALONE = Parallel()


def context_parallel() -> Parallel:
    """Where Megatron has put this process; asked at every call, since slime rebuilds its groups between
    steps.

    Never imports Megatron: a process that has not imported it has not initialised it either.
    """
    state = sys.modules.get("megatron.core.parallel_state") or sys.modules.get("megatron.core.mpu")
    if state is None or not state.model_parallel_is_initialized():
        return ALONE
    size = state.get_context_parallel_world_size()
    if size == 1:
        return ALONE
    group = state.get_context_parallel_group()

    def all_sum(values: Tensor) -> Tensor:
        torch.distributed.all_reduce(values, group=group)
        return values

    return Parallel(state.get_context_parallel_rank(), size, all_sum)


def zigzag(
    total_length: int, response_length: int, cp_rank: int, cp_size: int, padded_length: int | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two runs of response tokens (start, stop) that a context-parallel rank holds; either may be empty.

    The sequence, or the ``padded_length`` that --qkv-format bshd gives it, is padded to 2 cp_size equal
    chunks; rank r holds chunks r and 2 cp_size - 1 - r. The log-prob of a token is made by the logit one
    position before it, so runs are cut at logit positions.

    >>> zigzag(12, 7, 0, 2), zigzag(12, 7, 1, 2)
    (((0, 0), (5, 7)), ((0, 2), (2, 5)))
    """
    chunk = -(-(padded_length or total_length) // (2 * cp_size))
    first_logit = total_length - response_length - 1

    def run(index: int) -> tuple[int, int]:
        start, stop = (
            min(max(at - first_logit, 0), response_length) for at in (index * chunk, (index + 1) * chunk)
        )
        return start, stop

    return run(cp_rank), run(2 * cp_size - 1 - cp_rank)


def slice_response(
    values: Sliceable, total_length: int, response_length: int, cp_rank: int, cp_size: int
) -> Sliceable:
    """A full response [R] -> the part [L] that this rank holds; the identity for one rank."""
    if cp_size == 1:
        return values
    (a, b), (c, d) = zigzag(total_length, response_length, cp_rank, cp_size)
    return values[a:b] + values[c:d] if isinstance(values, list) else torch.cat([values[a:b], values[c:d]])


def pack_segments(
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    padded_lengths: Sequence[int] | None = None,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    all_sum: AllSum = identity,
) -> Segments:
    """The segments of a micro-batch as slime holds it: full masks on every rank, zig-zag slices of all else.

    Args:
        loss_masks: N x [R_i], any dtype, not 0 where the behavior policy sampled the token.
        total_lengths: N prompt + response lengths.
        response_lengths: N response lengths.
        padded_lengths: N lengths that chunks are cut from; None: the total lengths.
        all_sum: SUM over the context-parallel group.

    Raises:
        DataError: a mask has another length than its response.
    """
    check_lengths("loss_masks", loss_masks, response_lengths)
    mask = torch.cat(list(loss_masks)) if loss_masks else torch.zeros(0)
    if cp_size == 1:
        return Segments.whole(response_lengths, mask)
    pieces = []
    lengths = zip(total_lengths, response_lengths, padded_lengths or total_lengths, strict=True)
    for i, (total, response, padded) in enumerate(lengths):
        runs = zigzag(total, response, cp_rank, cp_size, padded)
        slots = (cp_rank, 2 * cp_size - 1 - cp_rank)
        pieces += [(i, start, stop, slot) for (start, stop), slot in zip(runs, slots, strict=True)]
    return Segments(tuple(response_lengths), tuple(pieces), mask != 0, 2 * cp_size, all_sum)


@dataclass(frozen=True)
class Packed:
    """One hook call as flat tensors [T]; ``target`` carries the gradient."""

    segments: Segments
    proximal: Tensor
    behavior: Tensor
    target: Tensor | None
    advantages: Tensor | None


def pack(call: HookCall, parallel: Parallel = ALONE) -> Packed:
    """Lists of local slices -> flat tensors, with every length checked against what this rank must hold.

    A behavior log-prob above 0 is no log-prob: it becomes NaN, and what is done about NaN is done about it.

    Raises:
        ConfigError: the host pads sequences to lengths that it did not pass.
        DataError: a list or a tensor has another length than this rank holds.
    """
    padded = getattr(call.args, "qkv_format", None) == "bshd"
    if padded and parallel.size > 1 and call.max_seq_lens is None:
        raise ConfigError(
            "max_seq_lens: expected the padded lengths beside --qkv-format bshd and context parallelism, "
            f"got none: add {CARRY}, which carries them, or use --qkv-format thd"
        )
    segments = pack_segments(
        call.loss_masks,
        call.total_lengths,
        call.response_lengths,
        call.max_seq_lens,
        cp_rank=parallel.rank,
        cp_size=parallel.size,
        all_sum=parallel.all_sum,
    )
    proximal, behavior, advantages = _together(call, segments)
    if isinstance(call.rollout_log_probs, Tensor):
        behavior = behavior.clone()  # lists are copied where they are joined
    behavior = behavior.masked_fill_(behavior > HIGHEST, torch.nan)
    target = _flat("cur_log_probs", call.cur_log_probs, segments)
    return Packed(segments, proximal, behavior, target, advantages)


def check_loss(pg_loss: Tensor, segments: Segments) -> None:
    """Raises DataError if the host's loss is not one number for each token of this rank."""
    if pg_loss.numel() != segments.size:
        raise DataError(f"pg_loss: expected {segments.size} tokens on this rank, got {pg_loss.numel()}")


def unpack_masks(keep: Tensor, loss_masks: Sequence[Tensor], segments: Segments) -> list[Tensor]:
    """The host's masks without the rejected tokens, full length on every rank.

    Args:
        keep: [T] bool, local.
        loss_masks: N x [R_i], the host's; not written to.
    """
    if not loss_masks:
        return []
    if not segments.is_whole:
        # Other ranks hold the rest of keep: one more SUM, of disjoint shares.
        share = torch.zeros(segments.full_mask.shape, dtype=torch.int32, device=keep.device)
        keep = segments.all_sum(share.index_copy(0, segments.positions, keep.int())) > 0
    reduced = torch.where(keep, torch.cat(list(loss_masks)), 0)
    return list(reduced.split(list(segments.lengths)))


def locate(index: int, segments: Segments) -> tuple[int, int]:
    """A local token index -> (sequence, position in its response); for messages, outside the hot path."""
    begins = list(accumulate((stop - start for _, start, stop, _ in segments.pieces), initial=0))
    for (sequence, start, _, _), begin, end in zip(segments.pieces, begins, begins[1:], strict=False):
        if begin <= index < end:
            return sequence, start + index - begin
    raise IndexError(index)


def _together(call: HookCall, segments: Segments) -> Sequence[Tensor | None]:
    """The flat tensors of what carries no gradient, joined in one operation where all are lists of one
    dtype."""
    names = ("train_log_probs", "rollout_log_probs", "advantages")
    given = {name: values for name in names if (values := getattr(call, name)) is not None}
    if not segments.size or not _is_alike(given.values()):
        return [_flat(name, given.get(name), segments) for name in names]
    for name, values in given.items():
        check_lengths(name, values, segments.local_lengths)
    flat = torch.cat(list(chain.from_iterable(given.values())))
    joined = dict(zip(given, flat.split(segments.size), strict=True))
    return [joined.get(name) for name in names]


def _is_alike(lists: Iterable[Sequence[Tensor] | Tensor]) -> bool:
    """Whether all are lists that hold something, of one dtype by their first."""
    first = [None if isinstance(values, Tensor) or not values else values[0].dtype for values in lists]
    return None not in first and len(set(first)) == 1


def _flat(name: str, values: Sequence[Tensor] | Tensor | None, segments: Segments) -> Tensor | None:
    if values is None:
        return None
    if isinstance(values, Tensor):
        if values.numel() != segments.size:
            raise DataError(f"{name}: expected {segments.size} tokens on this rank, got {values.numel()}")
        return values.reshape(-1)
    check_lengths(name, values, segments.local_lengths)
    return torch.cat(list(values)) if values else segments.full_mask.new_zeros(0, dtype=torch.float32)

"""Packs slime's lists into flat tensors, and unpacks masks.

Under context parallelism slime cuts a padded sequence into equal *chunks* and gives each rank two of them.
The *shards* of a response are its tokens in these chunks. Tensors are *packed*: the shards of all sequences,
one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slime_ext.core.tokens import Tokens
from slime_ext.errors import ConfigError, DataError, NonFiniteError
from slime_ext.host.ranks import ALONE, Parallel
from slime_ext.hosts.contract import INIT_FLAG, HookCall
from slime_ext.hosts.slices import zigzag
from slime_ext.ops.divergences import is_log_prob
from slime_ext.ops.segments import Segments, Shard, detached

BEHAVIOR = "rollout_log_probs"  # the host's keyword
OVERFLOW = "the host's loss is NaN because of it; look for an overflow in the trainer's forward pass"
CONSEQUENCES = {  # keyword of the host -> what follows if its value is not ``usable``, or what to do
    "train_log_probs": OVERFLOW,
    "cur_log_probs": OVERFLOW,
    BEHAVIOR: "the correction has on_nonfinite: raise; to reject such tokens, write on_nonfinite: reject",
}


def pack_segments(
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    padded_lengths: Sequence[int] | None = None,
    here: Parallel = ALONE,
) -> Segments:
    """Makes the segments of a micro-batch from slime's lists.

    slime holds full masks on every rank, and of everything else the rank's shards.

    Args:
        loss_masks: N x [R_i], any dtype, nonzero where the behavior policy sampled the token.
        total_lengths: N prompt + response lengths.
        response_lengths: N response lengths.
        padded_lengths: N lengths from which chunks are cut. None: the total lengths.
        here: this rank's place among the ranks that share its sequences.
    """
    mask = join(loss_masks, response_lengths, "loss_masks").to(torch.bool)
    if here.size == 1:
        return Segments(tuple(response_lengths), None, mask)
    shards: list[Shard] = []
    lengths = zip(total_lengths, response_lengths, padded_lengths or total_lengths, strict=True)
    for i, (total, response, padded) in enumerate(lengths):
        spans = zigzag(total, response, here.rank, here.size, padded)
        numbers = (here.rank, 2 * here.size - 1 - here.rank)
        shards += [(i, start, stop, number) for (start, stop), number in zip(spans, numbers, strict=True)]
    return Segments(tuple(response_lengths), tuple(shards), mask, 2 * here.size, here.all_sum)


def pack(call: HookCall, parallel: Parallel = ALONE) -> Tokens:
    """Packs the lists of a call into flat tensors [T], and checks every length.

    Raises:
        ConfigError: the host pads sequences to lengths that it did not pass.
        DataError: a list or a tensor has another length than this rank holds.
    """
    if getattr(call.args, "qkv_format", None) == "bshd" and parallel.size > 1 and call.max_seq_lens is None:
        raise ConfigError(
            "max_seq_lens: expected the padded lengths beside --qkv-format bshd and context parallelism, "
            f"got none: add {INIT_FLAG}, which passes them on, or use --qkv-format thd"
        )
    segments = pack_segments(
        call.loss_masks, call.total_lengths, call.response_lengths, call.max_seq_lens, parallel
    )
    lengths, flat = segments.local_lengths, {}
    for name in ("cur_log_probs", "advantages", "train_log_probs", "rollout_log_probs"):
        if (values := getattr(call, name)) is not None:
            flat[name] = join(values, lengths, name)
    return Tokens(
        segments,
        flat["train_log_probs"],
        flat["rollout_log_probs"],
        flat.get("cur_log_probs"),
        flat.get("advantages"),
        head=call.head,
    )


def unpack_masks(keep: Tensor, loss_masks: Sequence[Tensor], segments: Segments) -> list[Tensor]:
    """Removes rejected tokens from the host's masks, at full length on every rank.

    Args:
        keep: [T] bool, local.
        loss_masks: N x [R_i], the host's masks, which are not changed.
    """
    if not loss_masks:
        return []
    if segments.shards is not None:
        # Other ranks hold the rest of keep. The shares are disjoint, so one SUM joins them.
        share = torch.zeros(segments.full_mask.shape, dtype=torch.int32, device=keep.device)
        keep = segments.all_sum(share.index_copy(0, segments.positions, keep.int())) > 0
    reduced = torch.split(torch.cat(list(loss_masks)).masked_fill(~keep, 0), list(segments.lengths))
    return [part.to(mask.dtype) for part, mask in zip(reduced, loss_masks, strict=True)]


def locate(index: int, segments: Segments) -> tuple[int, int]:
    """Finds the sequence and the response position of a local token, for messages."""
    for sequence, start, stop, _ in segments.local_shards:
        if index < stop - start:
            return sequence, start + index
        index -= stop - start
    raise IndexError(index)


def usable(name: str, values: Tensor) -> Tensor:
    """Marks the usable values of a keyword, [T] bool.

    A value of the behavior policy must be a log-prob. A value of the trainer's policies need only be finite,
    because only NaN and infinities spoil the host's loss.
    """
    return is_log_prob(values) if name == BEHAVIOR else values.abs() < torch.inf


def wanted(name: str) -> str:
    """Describes what ``usable`` accepts, for messages."""
    return "a log-prob above -1000 and at most 0" if name == BEHAVIOR else "a finite log-prob"


def require_usable(name: str, values: Tensor, segments: Segments, consequence: str) -> None:
    """Raises NonFiniteError at the first response token whose value [T] is not ``usable``.

    On CUDA it returns at once, because reading the values would wait for the device.

    Args:
        name: the host's keyword.
        consequence: what follows from such a value, for the message.
    """
    values = detached(values)
    if values.device.type != "cpu":
        return
    if name != BEHAVIOR and math.isfinite(values.sum(dtype=torch.float32)):
        return  # a finite sum proves that all are finite; an infinite one may come from masked tokens
    bad = segments.mask & ~usable(name, values)
    if not bad.any():
        return
    index = int(bad.int().argmax())
    sequence, position = locate(index, segments)
    raise NonFiniteError(
        f"{name}, sequence {sequence} of {segments.count}, response token {position}: expected "
        f"{wanted(name)}, got {float(values[index])}: {consequence}"
    )


def require_flat(where: str, values: Tensor, length: int) -> None:
    """Raises DataError unless a tensor has shape [length], because others would broadcast silently."""
    if values.shape != (length,):
        raise DataError(
            f"{where}: expected {length} tokens on this rank, got a tensor of shape {list(values.shape)}: "
            "pass one number per token, and every list from the same context-parallel slice"
        )


def join(values: Sequence[Tensor] | Tensor, lengths: Sequence[int], name: str) -> Tensor:
    """Joins a tensor per sample into a flat tensor [T]. A flat tensor is returned unchanged.

    Args:
        lengths: the number of tokens that this rank holds of each sample.
        name: the host's keyword, for errors.
    """
    if isinstance(values, Tensor):
        require_flat(name, values, sum(lengths))
        return values
    if len(values) != len(lengths):
        raise DataError(
            f"{name}: expected {len(lengths)} samples, got {len(values)}: pass one tensor per sample"
        )
    if not values:
        return torch.zeros(0)
    try:
        flat = torch.cat(list(values)) if len(values) > 1 else values[0].contiguous()
        # All lengths are compared at once. Checking 512 shapes one by one takes longer than joining them.
        fits = flat.dim() == 1 and [*map(Tensor.numel, values)] == [*lengths]
    except (AttributeError, TypeError, RuntimeError):  # a part is no tensor, or has another shape
        fits = False
    return flat if fits else _join_checked(values, lengths, name)


def _join_checked(values: Sequence[Tensor], lengths: Sequence[int], name: str) -> Tensor:
    """Does the same as ``join``, part by part, to name the part that does not fit."""
    for i, (part, length) in enumerate(zip(values, lengths, strict=True)):
        if not isinstance(part, Tensor):
            raise DataError(
                f"{name}, sequence {i} of {len(lengths)}: expected a tensor, got {type(part).__name__}: "
                "turn it into a tensor, as slime does before it calls the hook"
            )
        if part.shape != (length,):
            require_flat(f"{name}, sequence {i} of {len(lengths)}", part, length)
    return torch.cat(list(values))  # no part explains the failure: raises torch's own error

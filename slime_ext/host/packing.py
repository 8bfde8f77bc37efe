"""slime's lists and zig-zag context-parallel slices <-> one flat tensor per quantity."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.state import Tokens
from slime_ext.errors import ConfigError, DataError, NonFiniteError
from slime_ext.host.contract import INIT_FLAG, HookCall
from slime_ext.ops.divergences import is_log_prob
from slime_ext.ops.segments import AllSum, Segments, Shard, identity, require_contiguous

BEHAVIOR = "rollout_log_probs"  # the host's keyword
OVERFLOW = "the host's loss is NaN because of it; look for an overflow in the trainer's forward pass"
CONSEQUENCES = {  # keyword of the host -> what a value of it that is not ``usable`` means
    "train_log_probs": OVERFLOW,
    "cur_log_probs": OVERFLOW,
    BEHAVIOR: "on_nonfinite: raise asks to stop here",
}


@dataclass(frozen=True)
class Parallel:
    """This rank's place among those that share sequences."""

    rank: int = 0
    size: int = 1
    all_sum: AllSum = identity


ALONE = Parallel()


def parallel_state() -> Any:
    """Megatron's parallel state; None where nothing has initialised it (or imported it)."""
    state = sys.modules.get("megatron.core.parallel_state") or sys.modules.get("megatron.core.mpu")
    return state if state is not None and state.model_parallel_is_initialized() else None


def context_parallel() -> Parallel:
    """This process among its context-parallel ranks; asked at every call, for slime rebuilds its groups
    between steps."""
    state = parallel_state()
    if state is None or (size := state.get_context_parallel_world_size()) == 1:
        return ALONE
    rank = state.get_context_parallel_rank()
    return Parallel(rank, size, sum_over(state.get_context_parallel_group()))


def sum_over(group: Any) -> AllSum:
    """The all-reduce of a process group, in place. Raises DataError as ``require_contiguous``."""

    def all_sum(values: Tensor) -> Tensor:
        require_contiguous(values)
        torch.distributed.all_reduce(values, group=group)
        return values

    return all_sum


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


def pack_segments(
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    padded_lengths: Sequence[int] | None = None,
    here: Parallel = ALONE,
) -> Segments:
    """The segments of a micro-batch as slime holds it: full masks on every rank, zig-zag slices of all else.

    Args:
        loss_masks: N x [R_i], any dtype, not 0 where the behavior policy sampled the token.
        total_lengths: N prompt + response lengths.
        response_lengths: N response lengths.
        padded_lengths: N lengths that chunks are cut from; None: the total lengths.
        here: this rank among those that share sequences.
    """
    mask = join(loss_masks, response_lengths, "loss_masks").to(torch.bool)
    if here.size == 1:
        return Segments(tuple(response_lengths), None, mask)
    shards: list[Shard] = []
    lengths = zip(total_lengths, response_lengths, padded_lengths or total_lengths, strict=True)
    for i, (total, response, padded) in enumerate(lengths):
        runs = zigzag(total, response, here.rank, here.size, padded)
        numbers = (here.rank, 2 * here.size - 1 - here.rank)
        shards += [(i, start, stop, number) for (start, stop), number in zip(runs, numbers, strict=True)]
    return Segments(tuple(response_lengths), tuple(shards), mask, 2 * here.size, here.all_sum)


def pack(call: HookCall, parallel: Parallel = ALONE) -> Tokens:
    """Lists of local slices -> flat tensors [T], with every length checked against what this rank must hold.

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
    """The host's masks without the rejected tokens, full length on every rank, in the host's dtype.

    Args:
        keep: [T] bool, local.
        loss_masks: N x [R_i], the host's; not written to.
    """
    if not loss_masks:
        return []
    if segments.shards is not None:
        # Other ranks hold the rest of keep: one more SUM, of disjoint shares.
        share = torch.zeros(segments.full_mask.shape, dtype=torch.int32, device=keep.device)
        keep = segments.all_sum(share.index_copy(0, segments.positions, keep.int())) > 0
    reduced = torch.split(torch.cat(list(loss_masks)).masked_fill(~keep, 0), list(segments.lengths))
    return [part.to(mask.dtype) for part, mask in zip(reduced, loss_masks, strict=True)]


def locate(index: int, segments: Segments) -> tuple[int, int]:
    """A local token index -> (sequence, position in its response); for messages, outside the hot path."""
    for sequence, start, stop, _ in segments.local_shards:
        if index < stop - start:
            return sequence, start + index
        index -= stop - start
    raise IndexError(index)


def usable(name: str, values: Tensor) -> Tensor:
    """[T] bool: of the behavior policy, what is a log-prob; of the trainer's policies, what is finite,
    because only NaN and infinities spoil the host's loss."""
    return is_log_prob(values) if name == BEHAVIOR else values.abs() < torch.inf


def wanted(name: str) -> str:
    """What ``usable`` accepts, for messages."""
    return "a log-prob above -1000 and at most 0" if name == BEHAVIOR else "a finite log-prob"


def require_usable(name: str, values: Tensor, segments: Segments, consequence: str) -> None:
    """Raises NonFiniteError at the first response token whose value [T] is not ``usable``. On CUDA it returns
    at once, because looking would wait for the device.

    Args:
        name: the host's keyword.
        consequence: what such a value means, for the message.
    """
    values = values.detach()
    if values.device.type != "cpu":
        return
    if name != BEHAVIOR and math.isfinite(values.sum(dtype=torch.float32)):
        return  # one number says that all are finite; where it does not, masked tokens may be why
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
    """Raises DataError unless a tensor is [length]: in another shape it would broadcast in silence."""
    if values.shape != (length,):
        raise DataError(
            f"{where}: expected {length} tokens on this rank, got a tensor of shape {list(values.shape)}: "
            "every list must come from the same context-parallel slice, one number per token"
        )


def join(values: Sequence[Tensor] | Tensor, lengths: Sequence[int], name: str) -> Tensor:
    """A tensor per sample -> one flat tensor [T]; one that is flat already as it is.

    Args:
        lengths: how many tokens of each sample this rank holds.
        name: the host's keyword, for errors.
    """
    if isinstance(values, Tensor):
        require_flat(name, values, sum(lengths))
        return values
    if len(values) != len(lengths):
        raise DataError(f"{name}: expected {len(lengths)} samples, got {len(values)}: one tensor per sample")
    if not values:
        return torch.zeros(0)
    with contextlib.suppress(TypeError, RuntimeError):  # of something that is no tensor, or has another shape
        flat = torch.cat(list(values))
        # Every length at once, because a look at the shape of 512 tensors takes longer than to join them.
        if flat.dim() == 1 and [*map(Tensor.numel, values)] == [*lengths]:
            return flat
    for i, (part, length) in enumerate(zip(values, lengths, strict=True)):
        if not isinstance(part, Tensor):
            raise DataError(
                f"{name}, sequence {i} of {len(lengths)}: expected a tensor, got {type(part).__name__}: "
                "turn it into one, as slime does before it calls the hook"
            )
        if part.shape != (length,):
            require_flat(f"{name}, sequence {i} of {len(lengths)}", part, length)
    return torch.cat(list(values))  # raises what it raised before

"""Reads SGLang's answers about the tokens that it could have drawn, in all their forms.

The head, its K most likely tokens, comes as lists (output_top_logprobs) or in base64. SGLang uses base64 if
it is asked for flat arrays, and slime's build of it always does (slime, utils/score_centering.py 2e5cd7c).
The support, the tokens that top-p leaves, comes only from slime's build.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.errors import DataError
from slime_ext.host.heads import Rows

# These flags ask for flat arrays in base64 instead of lists. A release of SGLang that has no
# output_top_logprobs_val_flat_b64 ignores them, and a router that does not know them drops them
# (sglang-router 0.3.2). Both answer with lists. A release that flattens only prompts needs the first flag
# beside the last.
FLAT = dict.fromkeys(
    (
        "return_flat_raw_top_logprobs",
        "return_flat_raw_output_top_logprobs",
        "return_flat_raw_top_logprobs_b64",
    ),
    True,
)
OF_SUPPORT = dict.fromkeys(("return_top_p_token_ids", "return_top_p_log_probs"), True)
LISTS = "output_top_logprobs"
NO_NUMBERS = (
    TypeError,
    ValueError,
    RuntimeError,
    OverflowError,
    IndexError,
    KeyError,
)  # raised by making a tensor
CHANGED = "send requests to SGLang itself, because this is another server, or a proxy changes its answers"


class Packed(NamedTuple):
    """Names the fields of a head in base64: int32 ids, float32 log-probs, their shape."""

    ids: str
    log_probs: str
    shape: str
    lacking: str = ""  # field with the number of tokens at the beginning that have no head


PACKED = (
    Packed("output_topk_token_ids", "output_topk_log_probs", "output_topk_shape"),
    Packed(
        "output_top_logprobs_idx_flat_b64",
        "output_top_logprobs_val_flat_b64",
        "output_top_logprobs_shape",
        "output_top_logprobs_null_prefix",
    ),
)


def none(tokens: int, top_k: int) -> Rows:
    """Makes empty heads, for tokens that the engine did not sample."""
    return torch.zeros(tokens, top_k, dtype=torch.int64), torch.full((tokens, top_k), -torch.inf)


def read(meta_info: Mapping[str, Any], top_k: int, sample: Any = None) -> Rows:
    """Reads the heads of an answer, one for each sampled token.

    A head of fewer than ``top_k`` tokens is padded with -inf.

    Args:
        sample: the index of the sample, for messages.

    Raises:
        DataError: the answer has no such heads.
    """
    count = len(meta_info.get("output_token_logprobs") or ())
    packed = next((names for names in PACKED if names.ids in meta_info), None)
    if count == 0 and not meta_info.get(LISTS):
        return none(0, top_k)
    if packed is None:
        ids, log_probs = _listed(meta_info, count, top_k, sample)
    else:
        ids, log_probs = _unpacked(meta_info, packed, count, top_k, sample)
    short = (0, top_k - ids.shape[1])
    return pad(ids.long(), short), pad(log_probs, short, value=-torch.inf)


def _listed(meta_info: Mapping[str, Any], count: int, top_k: int, sample: Any) -> Rows:
    heads = meta_info.get(LISTS) or ()
    if len(heads) != count or not all(heads):
        raise DataError(
            f"{LISTS}, sample {sample}: expected the head of each of {count} sampled tokens, got "
            f"{sum(map(bool, heads))}: use an engine that answers top_logprobs_num, as SGLang does"
        )
    try:
        ids = torch.tensor([[entry[1] for entry in head] for head in heads], dtype=torch.int64)
        log_probs = torch.tensor([[entry[0] for entry in head] for head in heads], dtype=torch.float32)
    except NO_NUMBERS:
        ids = log_probs = torch.zeros(0)
    if ids.dim() != 2 or ids.shape[1] > top_k:
        raise DataError(
            f"{LISTS}, sample {sample}: expected the same number of pairs (log-prob, id) at every token, at "
            f"most {top_k} (center.top_k), got something else: {CHANGED}"
        )
    return ids, log_probs


def _unpacked(meta_info: Mapping[str, Any], names: Packed, count: int, top_k: int, sample: Any) -> Rows:
    if lacking := meta_info.get(names.lacking):
        raise DataError(
            f"{names.ids}, sample {sample}: expected the head of each of {count} sampled tokens, got none of "
            f"the first {lacking}: {CHANGED}"
        )
    shape = meta_info.get(names.shape)
    try:
        rows, width = (int(size) for size in shape or ())
    except (TypeError, ValueError):
        rows = width = -1
    if rows != count or not 0 < width <= top_k:
        raise DataError(
            f"{names.shape}, sample {sample}: expected [{count}, {top_k} or fewer], the sampled tokens and "
            f"center.top_k, got {_brief(shape)}: {CHANGED}"
        )
    both = {names.ids: torch.int32, names.log_probs: torch.float32}
    for name, kind in both.items():
        wanted = str(kind).removeprefix("torch.")
        if (marked := meta_info.get(f"{name}_dtype", wanted)) != wanted:
            raise DataError(
                f"{name}_dtype, sample {sample}: expected {wanted}, got {_brief(marked)}: {CHANGED}"
            )
    ids, log_probs = (_numbers(meta_info, name, kind, rows * width, sample) for name, kind in both.items())
    return ids.view(rows, width), log_probs.view(rows, width)


def read_support(meta_info: Mapping[str, Any], sample: Any = None) -> Tensor:
    """Reads the log-probs of an answer's supports, joined to [N] float32.

    A support is the set of tokens that top-p leaves. The host keeps their ids and offsets.

    Raises:
        DataError: the engine did not return them.
    """
    if not meta_info.get("output_token_logprobs"):
        return torch.zeros(0)
    names = "top_p_token_ids", "top_p_log_probs"
    lacking = next((name for name in names if meta_info.get(name) is None), None)
    if lacking is not None:
        raise DataError(
            f"{lacking}, sample {sample}: expected it in the engine's answer beside center and "
            "--rollout-top-p, got none: use slime's build of SGLang, which answers return_top_p_log_probs, "
            "without a router that drops this field (sglang-router 0.3.2 does), or remove --rollout-top-p"
        )
    ids = _numbers(meta_info, names[0], torch.int32, None, sample)
    return _numbers(meta_info, names[1], torch.float32, len(ids), sample)


def _numbers(
    meta_info: Mapping[str, Any], name: str, kind: torch.dtype, count: int | None, sample: Any
) -> Tensor:
    """Reads [count] numbers from a list, or from base64 of little-endian bytes."""
    value, got = meta_info.get(name), "something else"
    try:
        if isinstance(value, str):
            data = bytearray(base64.b64decode(value, validate=True))
            numbers = torch.frombuffer(data, dtype=kind) if data else torch.zeros(0, dtype=kind)
        else:
            numbers = torch.tensor(value, dtype=kind)
        if numbers.dim() == 1 and count in (None, len(numbers)):
            return numbers
        got = f"{numbers.numel()}"
    except NO_NUMBERS:
        pass
    wanted = "" if count is None else f"{count} "
    raise DataError(
        f"{name}, sample {sample}: expected {wanted}numbers of 4 bytes in base64, got {got}: {CHANGED}"
    )


def _brief(value: Any) -> str:
    """Shortens a shape for a message. For any other value it names only the type."""
    is_shape = isinstance(value, list | tuple) and all(isinstance(size, int) for size in value)
    return str(list(value[:4])) if is_shape else type(value).__name__

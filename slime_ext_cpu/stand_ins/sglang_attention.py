"""Computes the attention of a batch at once, where SGLang's torch_native backend loops.

SGLang 0.5.23 has CUDA kernels for this. Its torch fallback calls `scaled_dot_product_attention` once per
request and layer, which costs as much as all matrix products of a small model.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from slime_ext_cpu.stand_ins.bfloat16 import widened

if TYPE_CHECKING:  # a stand-in is registered in every process, before anything imports torch
    from torch import Tensor


def attend_batched(module: ModuleType) -> None:
    """Replaces the loops of `TorchNativeAttnBackend`, for causal attention without a sliding window."""

    def extend(self: Any, *args: Any, **options: Any) -> Tensor:
        return _attend(*args[:7], args[8].tolist(), **options)  # args[7] holds lengths of cached prefixes

    def decode(self: Any, *args: Any, **options: Any) -> Tensor:
        return _attend(*args[:7], [1] * len(args[6]), **options)

    backend = module.TorchNativeAttnBackend
    backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode = extend, decode


def _attend(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    seq_lens: Tensor,
    query_lens: list[int],
    scaling: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """Writes the attention of every query token to `output` and returns it.

    The queries of a request are the last tokens of its sequence. Requests are padded to the longest.

    Args:
        query: [tokens, heads, width], one request after another.
        output: [tokens, heads, width].
        k_cache: [places, key heads, width].
        v_cache: [places, key heads, width].
        req_to_token: [requests, context], the place of each token of a request.
        requests: [B] rows of `req_to_token`.
        seq_lens: [B] tokens of each sequence, including its queries.
        query_lens: number of queries of each request.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from torch.nn.utils.rnn import pad_sequence

    keys_at = torch.arange(int(seq_lens.max()))  # [K]
    lengths = torch.tensor(query_lens)
    queries_at = (seq_lens - lengths)[:, None] + torch.arange(max(query_lens))  # [B, Q]
    seen = keys_at <= queries_at[..., None]  # [B, Q, K]
    places = req_to_token[requests, : len(keys_at)]
    places = places.masked_fill(keys_at >= seq_lens[:, None], 0)  # 0 is SGLang's place of padding
    keys, values = (cache[places].to(query.dtype).transpose(1, 2) for cache in (k_cache, v_cache))
    padded = pad_sequence(query.split(query_lens), batch_first=True).transpose(1, 2)  # [B, heads, Q, width]
    mixed = scaled_dot_product_attention(
        *map(widened, (padded, keys, values)), attn_mask=seen[:, None], scale=scaling, enable_gqa=enable_gqa
    )
    is_query = torch.arange(max(query_lens)) < lengths[:, None]
    output.copy_(mixed.transpose(1, 2)[is_query])
    return output

"""Attention over packed sequences of any length, context parallel, for machines without Transformer Engine.

Shapes: T packed local tokens, S sequences, L the longest of them, n context-parallel ranks, H query heads,
G key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slime_ext.errors import ConfigError

BEHIND = 1 << 40  # the position of padding: no token sees it, and it sees all


def positions(lengths: list[int], rank: int, size: int) -> list[Tensor]:
    """Position in its sequence of each token on a context-parallel rank, a tensor per sequence.

    Every sequence is cut into 2 * size chunks; a rank holds chunk ``rank`` followed by chunk
    ``2 * size - 1 - rank`` of each one, the layout of Megatron's packed RoPE and of slime.

    Args:
        lengths: of the whole sequences.

    Raises:
        ConfigError: a sequence that does not cut into 2 * size equal chunks.
    """
    if size == 1:
        return [torch.arange(length) for length in lengths]
    if any(length % (2 * size) for length in lengths):
        raise ConfigError(
            f"packed attention: expected lengths in multiples of {2 * size} (2 x context parallel size), got "
            f"{lengths}: pad each sequence"
        )
    chunks = [torch.arange(length).view(2 * size, length // (2 * size)) for length in lengths]
    return [torch.cat([parts[rank], parts[-1 - rank]]) for parts in chunks]


class PackedAttention(torch.nn.Module):
    """Megatron's ``core_attention`` for packed sequences: softmax(q k^T / sqrt(D)) v, causal per sequence.

    Keys and values are gathered over the context-parallel group (the gradient is scattered back) and stay in
    the order of the ranks; who sees whom is told by positions.
    """

    def __init__(
        self,
        config: object,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [T, H, D], key and value [T, G, D] -> [T, H * D].

        Raises:
            ConfigError: called without packed sequences.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ConfigError(
                "packed attention: expected packed_seq_params with qkv_format 'thd', got none: pack the batch"
            )
        lengths, sees, is_query = self._layout(packed_seq_params)
        both = torch.cat([key, value], dim=-1).contiguous()
        if (size := self.cp_group.size()) > 1:
            both = gather_from_sequence_parallel_region(
                both, tensor_parallel_output_grad=True, group=self.cp_group
            )
        parts = both.unflatten(0, (size, -1)).split(lengths, dim=1)  # of each sequence [n, L / n, G, 2 D]
        keys, values = pad_sequence([p.flatten(0, 1) for p in parts], True).transpose(1, 2).chunk(2, dim=-1)
        out = F.scaled_dot_product_attention(
            pad_sequence(query.split(lengths), True).transpose(1, 2),
            keys,
            values,
            attn_mask=sees,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.transpose(1, 2)[is_query].flatten(1)

    def _layout(self, params: PackedSeqParams) -> tuple[list[int], Tensor, Tensor]:
        """Local lengths, who sees whom [S, 1, L / n, L], which queries are tokens [S, L / n].

        Made once per micro-batch; the next layers read it from its parameters.
        """
        if not hasattr(params, "layout"):
            size, whole = self.cp_group.size(), params.cu_seqlens_q.diff().tolist()
            by_rank = [positions(whole, rank, size) for rank in range(size)]
            own = by_rank[self.cp_group.rank()]
            queries = pad_sequence(own, True, BEHIND)
            keys = pad_sequence([torch.cat(parts) for parts in zip(*by_rank, strict=True)], True, BEHIND)
            sees = keys[:, None, None] <= queries[:, None, :, None]
            params.layout = [length // size for length in whole], sees, queries != BEHIND
        return params.layout

"""Attention over packed sequences of any length, context parallel, for machines without Transformer Engine.

Shapes: T packed local tokens, A = T * cp packed tokens of all context-parallel ranks (rank after rank),
S sequences, L the longest of them, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from slime_ext.errors import ConfigError


@dataclass(frozen=True)
class PackedLayout:
    """Where every packed token belongs: computed once per micro-batch, used by every layer.

    Attributes:
        query_slot: [T] row of each local token in the padded queries [S * Lq].
        key_slot: [A] row of each gathered token in the padded keys [S * L].
        sequences, query_length, key_length: S, Lq = L / cp, L.
        mask: [S, 1, Lq, L] query may see key, by position in its sequence; None where plain causal says it.
    """

    query_slot: Tensor
    key_slot: Tensor
    sequences: int
    query_length: int
    key_length: int
    mask: Tensor | None


def zigzag_positions(cu_seqlens: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, local offset, position in the sequence) of each token on a context-parallel rank, each [T].

    Every sequence is cut into 2 * size chunks; a rank holds chunk ``rank`` followed by chunk
    ``2 * size - 1 - rank`` of each one, the layout of Megatron's packed RoPE and of slime.

    Args:
        cu_seqlens: [S + 1] cumulative lengths of the whole sequences, padded to multiples of 2 * size.
    """
    lengths = cu_seqlens.diff() // size
    sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    starts = F.pad(lengths.cumsum(0), (1, 0))[:-1]
    offset = torch.arange(sequence.numel(), device=lengths.device) - starts[sequence]
    chunk = lengths[sequence] // 2
    first, second = rank * chunk + offset, (2 * size - 1 - rank) * chunk + offset - chunk
    return sequence, offset, torch.where(offset < chunk, first, second)


def packed_layout(cu_seqlens: Tensor, rank: int, size: int) -> PackedLayout:
    """The layout of a micro-batch on one context-parallel rank.

    Raises:
        ConfigError: a sequence that does not cut into 2 * size equal chunks.
    """
    cu_seqlens = cu_seqlens.long()
    if size > 1 and bool((cu_seqlens % (2 * size)).any()):
        raise ConfigError(
            f"packed attention: expected lengths in multiples of {2 * size} (2 x context parallel size), got "
            f"{cu_seqlens.diff().tolist()}: pad each sequence"
        )
    shards = [zigzag_positions(cu_seqlens, r, size) for r in range(size)]
    key_length = int(cu_seqlens.diff().max())
    query_length = key_length // size
    sequence, offset, position = shards[rank]
    query_slot = sequence * query_length + offset
    count = cu_seqlens.numel() - 1
    return PackedLayout(
        query_slot=query_slot,
        key_slot=torch.cat([s * key_length + p for s, _, p in shards]),
        sequences=count,
        query_length=query_length,
        key_length=key_length,
        mask=None if size == 1 else _causal_mask(query_slot, position, count, query_length, key_length),
    )


def _causal_mask(slot: Tensor, position: Tensor, sequences: int, queries: int, keys: int) -> Tensor:
    """[S, 1, Lq, L]: key position <= query position. Rows without a token see key 0, so no row is empty."""
    padded = position.new_zeros(sequences * queries).index_copy(0, slot, position)
    return padded.view(sequences, 1, queries, 1) >= torch.arange(keys, device=slot.device)


class PackedAttention(torch.nn.Module):
    """Megatron's ``core_attention`` for packed sequences: softmax(q k^T / sqrt(D)) v, causal per sequence.

    Keys and values are gathered over the context-parallel group (the gradient is scattered back); a constant
    number of operations, whatever the number of sequences.
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
        layout = self._layout(packed_seq_params)
        if self.cp_group.size() > 1:
            both = torch.cat([key, value], dim=-1).contiguous()
            both = gather_from_sequence_parallel_region(
                both, tensor_parallel_output_grad=True, group=self.cp_group
            )
            key, value = both.chunk(2, dim=-1)
        out = F.scaled_dot_product_attention(
            _pad(query, layout.query_slot, layout.sequences, layout.query_length),
            _pad(key, layout.key_slot, layout.sequences, layout.key_length),
            _pad(value, layout.key_slot, layout.sequences, layout.key_length),
            attn_mask=layout.mask,
            is_causal=layout.mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, layout.query_slot).flatten(1)

    def _layout(self, params: PackedSeqParams | None) -> PackedLayout:
        if params is None or params.qkv_format != "thd":
            raise ConfigError(
                "packed attention: expected packed_seq_params with qkv_format 'thd', got none: pack the batch"
            )
        layout = getattr(params, "packed_layout", None)
        if layout is None:
            layout = packed_layout(params.cu_seqlens_q, self.cp_group.rank(), self.cp_group.size())
            params.packed_layout = layout  # the next layers of this micro-batch read it from here
        return layout


def _pad(packed: Tensor, slot: Tensor, sequences: int, length: int) -> Tensor:
    """[tokens, heads, D] -> [S, heads, length, D], zero where no token is."""
    padded = packed.new_zeros(sequences * length, *packed.shape[1:]).index_copy(0, slot, packed)
    return padded.unflatten(0, (sequences, length)).transpose(1, 2)

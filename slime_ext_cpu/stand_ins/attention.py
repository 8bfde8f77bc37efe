"""Computes attention over packed sequences, context parallel, on machines without Transformer Engine.

Shapes: T packed local tokens, S sequences, l tokens of the longest sequence on one rank, n context-parallel
ranks, H query heads, G key/value heads, D head dimension.
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
from slime_ext_cpu.stand_ins.bfloat16 import widened

BEHIND = 1 << 40  # the position of padding: no token sees it, and it sees every token


@dataclass(frozen=True)
class Layout:
    """The places of a micro-batch's tokens after padding to l tokens per sequence and rank.

    Attributes:
        is_token: [S, l] bool, False at padding.
        sees: [S, 1, l, n l] bool, whether a query may see a key, by their positions in the sequence. None if
            a plain causal mask is the same.
    """

    is_token: Tensor
    sees: Tensor | None


def layout(cu_seqlens: Tensor, rank: int, size: int) -> Layout:
    """Returns the layout on one context-parallel rank.

    Every sequence is cut into 2 * size chunks. Of each sequence, a rank holds chunk ``rank``, followed by
    chunk ``2 * size - 1 - rank``. This is the layout of Megatron's packed RoPE and of slime.

    Args:
        cu_seqlens: [S + 1] cumulative lengths of the whole sequences.

    Raises:
        ConfigError: a sequence cannot be cut into 2 * size equal chunks.
    """
    whole = cu_seqlens.long().diff()
    if size > 1 and bool((whole % (2 * size)).any()):
        raise ConfigError(
            f"packed attention: expected lengths in multiples of {2 * size} (2 x context parallel size), got "
            f"{whole.tolist()}: pad each sequence"
        )
    lengths = (whole // size)[:, None]
    offset = torch.arange(int(lengths.max()))
    is_token = offset < lengths
    if size == 1:
        return Layout(is_token, None)
    chunk, ranks = lengths // 2, torch.arange(size)[:, None, None]
    behind = (2 * size - 1 - ranks) * chunk + offset - chunk
    position = torch.where(offset < chunk, ranks * chunk + offset, behind)  # [n, S, l]
    position = torch.where(is_token, position, BEHIND)
    keys = position.transpose(0, 1).flatten(1)
    return Layout(is_token, keys[:, None, None] <= position[rank][:, None, :, None])


class PackedAttention(torch.nn.Module):
    """Megatron's ``core_attention`` for packed sequences: softmax(q k^T / sqrt(D)) v, causal per sequence.

    Keys and values are gathered over the context-parallel group, and the gradient is scattered back. They
    stay in the order of the ranks, because the mask compares positions and not places.
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
        """Maps query [T, H, D], key and value [T, G, D], to [T, H * D].

        Raises:
            ConfigError: the call has no packed sequences.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ConfigError(
                "packed attention: expected packed_seq_params with qkv_format 'thd', got none: pack the batch"
            )
        if not hasattr(packed_seq_params, "layout"):  # later layers of this micro-batch reuse it
            group = self.cp_group
            packed_seq_params.layout = layout(packed_seq_params.cu_seqlens_q, group.rank(), group.size())
        is_token, sees = packed_seq_params.layout.is_token, packed_seq_params.layout.sees
        both = torch.cat([key, value], dim=-1)
        if (size := self.cp_group.size()) > 1:
            both = gather_from_sequence_parallel_region(
                both, tensor_parallel_output_grad=True, group=self.cp_group
            )
        keys, values = _padded(both, is_token.expand(size, -1, -1)).chunk(2, dim=-1)
        out = F.scaled_dot_product_attention(
            *map(widened, (_padded(query, is_token[None]), keys, values)),
            attn_mask=sees,
            is_causal=sees is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.to(query.dtype).transpose(1, 2)[is_token].flatten(1)


def _padded(packed: Tensor, is_token: Tensor) -> Tensor:
    """Pads [tokens of all ranks, heads, D] to [S, heads, n l, D] with zeros.

    Args:
        is_token: [n, S, l].
    """
    padded = packed.new_zeros(*is_token.shape, *packed.shape[1:])
    padded = padded.index_put(is_token.nonzero(as_tuple=True), packed)
    return padded.transpose(0, 1).flatten(1, 2).transpose(1, 2)

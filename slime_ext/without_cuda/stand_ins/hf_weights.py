"""Hugging Face weights into Megatron's parameters, for hosts that read them through megatron.bridge alone.

slime v0.2.0 to v0.3.0 and miles (backends/megatron_utils/checkpoint.py, `_load_checkpoint_hf`) need
megatron.bridge, which needs Transformer Engine; slime from v0.3.1 on has a converter of its own
(hf_to_megatron), and keeps it. Here the embedded launcher reads them: Qwen3, Qwen2 and Llama.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module


def replace_loader(checkpoint: ModuleType) -> None:
    """Gives the host's checkpoint module a `_load_checkpoint_hf` that does without megatron.bridge."""
    if "megatron.bridge" not in inspect.getsource(checkpoint._load_checkpoint_hf):
        return

    def _load_checkpoint_hf(
        ddp_model: Sequence[Module], optimizer: object, args: Namespace, load_path: str
    ) -> tuple[int, int]:
        from transformers import AutoConfig

        from slime_ext.launcher.megatron.weights import load_hf_state, read_hf_checkpoint

        config = AutoConfig.from_pretrained(load_path, trust_remote_code=True)
        load_hf_state(ddp_model, read_hf_checkpoint(load_path), config)
        if optimizer is not None:
            optimizer.reload_model_params()
        return 0, 0

    checkpoint._load_checkpoint_hf = _load_checkpoint_hf

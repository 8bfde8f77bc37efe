"""Loads Hugging Face weights into Megatron's parameters without megatron.bridge.

slime v0.2.0 to v0.3.0 and miles (backends/megatron_utils/checkpoint.py, `_load_checkpoint_hf`) need
megatron.bridge, which needs Transformer Engine. slime from v0.3.1 on has its own converter (hf_to_megatron),
which stays in use.

Every host converts the other way when it pushes weights, and its `convert_to_hf` only moves values around. So
we number the places of each parameter and send the numbers through `convert_to_hf`. The result says, for each
Hugging Face tensor, which value belongs in which place. This module therefore knows no model's layout.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from slime_ext.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def replace_loader(checkpoint: ModuleType) -> None:
    """Replaces `_load_checkpoint_hf` of the host's checkpoint module if it needs megatron.bridge."""
    if "megatron.bridge" not in inspect.getsource(checkpoint._load_checkpoint_hf):
        return

    def _load_checkpoint_hf(
        ddp_model: Sequence[Module], optimizer: object, args: Namespace, load_path: str
    ) -> tuple[int, int]:
        fill(checkpoint.__name__.partition(".")[0], ddp_model, args, load_path)
        if optimizer is not None:
            optimizer.reload_model_params()
        return 0, 0

    checkpoint._load_checkpoint_hf = _load_checkpoint_hf


def fill(host: str, model: Sequence[Module], args: Namespace, folder: str | Path) -> None:
    """Fills this rank's parameters from the safetensors files of a Hugging Face directory.

    Args:
        host: "slime" or "miles"; its conversion says where each value goes.

    Raises:
        DataError: a tensor has another shape than the model expects.
    """
    from transformers import AutoConfig

    megatron = f"{host}.backends.megatron_utils"
    common = import_module(f"{megatron}.update_weight.common")
    # `unwrap` removes the rounding of `hosts.round_pushed`.
    convert = inspect.unwrap(import_module(f"{megatron}.megatron_to_hf").convert_to_hf)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    kind = args.model_name or type(config).__name__.lower()
    read = reader(Path(folder))
    for name, parameter in common.named_params_and_buffers(args, model):
        inputs = {"args": args, "name": name, "param": _numbered(parameter)}
        gather = common.all_gather_param
        whole = gather(**{key: inputs[key] for key in inspect.signature(gather).parameters})
        for hf_name, places in convert(args, kind, name, whole):
            source = TIED.get(hf_name, hf_name) if config.tie_word_embeddings else hf_name
            _put(parameter, places.long(), read(source), source)


def _numbered(parameter: Parameter) -> Tensor:
    """Returns a number for each place of a parameter, unique over all ranks.

    The host gathers the tensor as it gathers the parameter. It is float64, because that is exact up to 2^53,
    and parameters must be floats.
    """
    import torch

    first, count = torch.distributed.get_rank() * parameter.numel(), parameter.numel()
    places = torch.arange(first, first + count, dtype=torch.float64).view_as(parameter)
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "parallel_mode"):
        if hasattr(parameter, name):
            setattr(places, name, getattr(parameter, name))
    return places


def _put(parameter: Parameter, places: Tensor, values: Tensor, name: str) -> None:
    """Writes the values that belong to this rank's places."""
    import torch

    if places.shape != values.shape:
        raise DataError(
            f"weights: expected {name} to be {tuple(places.shape)}, got {tuple(values.shape)}: the weights "
            "belong to another model: give that model's flags"
        )
    places = places - torch.distributed.get_rank() * parameter.numel()
    is_local = (places >= 0) & (places < parameter.numel())
    parameter.data.view(-1)[places[is_local]] = values[is_local].to(parameter.dtype)


def reader(folder: Path) -> Callable[[str], Tensor]:
    """Returns a function from names to tensors in a directory's safetensors files."""
    from safetensors import safe_open

    files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}
    return lambda name: where[name].get_tensor(name)

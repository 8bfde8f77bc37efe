"""Hugging Face weights into Megatron's parameters, for hosts that read them through megatron.bridge alone.

slime v0.2.0 to v0.3.0 and miles (backends/megatron_utils/checkpoint.py, `_load_checkpoint_hf`) need
megatron.bridge, which needs Transformer Engine; slime from v0.3.1 on has a converter of its own
(hf_to_megatron), and keeps it.

Every host converts the other way for its pushes, and its `convert_to_hf` only moves values around. So each
parameter's places are numbered and sent through it: what comes out says, for each Hugging Face tensor, which
value belongs in which place. Nothing about a model's layout is written here.
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
    """Gives the host's checkpoint module a `_load_checkpoint_hf` that does without megatron.bridge."""
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
        host: "slime" or "miles", whose own conversion says where each value goes.

    Raises:
        DataError: a tensor is of another shape than the model's.
    """
    from transformers import AutoConfig

    megatron = f"{host}.backends.megatron_utils"
    common = import_module(f"{megatron}.update_weight.common")
    convert = inspect.unwrap(import_module(f"{megatron}.megatron_to_hf").convert_to_hf)  # never rounded
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    kind = args.model_name or type(config).__name__.lower()
    read = reader(Path(folder))
    for name, parameter in common.named_params_and_buffers(args, model):
        given = {"args": args, "name": name, "param": _numbered(parameter)}
        gather = common.all_gather_param
        whole = gather(**{key: given[key] for key in inspect.signature(gather).parameters})
        for hf_name, places in convert(args, kind, name, whole):
            source = TIED.get(hf_name, hf_name) if config.tie_word_embeddings else hf_name
            _put(parameter, places.long(), read(source), source)


def _numbered(parameter: Parameter) -> Tensor:
    """Each place's number, unique over all ranks, in a tensor that the host gathers like the parameter.

    float64: exact up to 2^53, and a type that parameters may have.
    """
    import torch

    first, count = torch.distributed.get_rank() * parameter.numel(), parameter.numel()
    places = torch.arange(first, first + count, dtype=torch.float64).view_as(parameter)
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "parallel_mode"):
        if hasattr(parameter, name):
            setattr(places, name, getattr(parameter, name))
    return places


def _put(parameter: Parameter, places: Tensor, values: Tensor, name: str) -> None:
    """Writes the values whose places are this rank's."""
    import torch

    if places.shape != values.shape:
        raise DataError(
            f"weights: expected {name} to be {tuple(places.shape)}, got {tuple(values.shape)}: the weights "
            "belong to another model configuration"
        )
    places = places - torch.distributed.get_rank() * parameter.numel()
    own = (places >= 0) & (places < parameter.numel())
    parameter.data.view(-1)[places[own]] = values[own].to(parameter.dtype)


def reader(folder: Path) -> Callable[[str], Tensor]:
    """name -> tensor, over the safetensors files of a directory."""
    from safetensors import safe_open

    files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}
    return lambda name: where[name].get_tensor(name)

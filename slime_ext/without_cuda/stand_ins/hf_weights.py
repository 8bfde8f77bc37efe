"""Hugging Face weights into Megatron's parameters, for hosts that read them through megatron.bridge alone.

slime v0.2.0 to v0.3.0 and miles (backends/megatron_utils/checkpoint.py, `_load_checkpoint_hf`) need
megatron.bridge, which needs Transformer Engine; slime from v0.3.1 on has a converter of its own
(hf_to_megatron), and keeps it.

No table of names is kept here: the host's own export (all_gather_param, then convert_to_hf) is run on the
positions of a parameter's elements, which says where in which Hugging Face tensor each of them goes.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from slime_ext.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter


def replace_loader(checkpoint: ModuleType) -> None:
    """Gives the host's checkpoint module a `_load_checkpoint_hf` that does without megatron.bridge."""
    if "megatron.bridge" not in inspect.getsource(checkpoint._load_checkpoint_hf):
        return
    package = checkpoint.__name__.removesuffix(".checkpoint")

    def _load_checkpoint_hf(
        ddp_model: Sequence[Module], optimizer: object, args: Namespace, load_path: str
    ) -> tuple[int, int]:
        load(ddp_model, args, Path(load_path), package)
        if optimizer is not None:
            optimizer.reload_model_params()
        return 0, 0

    checkpoint._load_checkpoint_hf = _load_checkpoint_hf


def load(model: Sequence[Module], args: Namespace, folder: Path, package: str) -> None:
    """Copies the weights of a Hugging Face folder into a model's parameters, on every rank its own part.

    Args:
        package: the host's package of Megatron code, e.g. "miles.backends.megatron_utils".

    Raises:
        DataError: the folder lacks a tensor that the host's export of this model would write.
    """
    import torch
    from transformers import AutoConfig

    common = import_module(f"{package}.update_weight.common")
    convert_to_hf = import_module(f"{package}.megatron_to_hf").convert_to_hf
    gather = common.all_gather_param
    if "args" in inspect.signature(gather).parameters:
        gather = _with_first(gather, args)
    kind = type(AutoConfig.from_pretrained(folder, trust_remote_code=True)).__name__.lower()
    weights = _read(folder)
    for name, parameter in common.named_params_and_buffers(args, model):
        whole = gather(name, _positions(parameter))
        with torch.no_grad():
            for key, positions in convert_to_hf(args, kind, name, whole):
                if key not in weights:
                    raise DataError(
                        f"{folder}: expected the tensor {key}, got none: Megatron has it as {name}"
                    )
                _copy(weights[key], positions, parameter)


def _with_first(call: Callable, first: object) -> Callable:
    return lambda *rest: call(first, *rest)


def _read(folder: Path) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return {
        key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()
    }


def _positions(parameter: Parameter) -> Parameter:
    """Of each element, as one number: rank in the tensor parallel group, then place in that rank's part.

    It carries the attributes by which the host gathers the parts of the parameter itself.
    """
    import torch
    from megatron.core import mpu

    start = mpu.get_tensor_model_parallel_rank() * parameter.numel()
    numbers = torch.arange(start, start + parameter.numel()).view_as(parameter)
    positions = torch.nn.Parameter(numbers, requires_grad=False)
    for name, value in _attributes(parameter):
        setattr(positions, name, value)
    return positions


def _attributes(parameter: Parameter) -> Iterator[tuple[str, object]]:
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "parallel_mode")
    for name, default in zip(names, (False, -1, 1, None), strict=True):
        yield name, getattr(parameter, name, default)


def _copy(source: Tensor, positions: Tensor, parameter: Parameter) -> None:
    """parameter[p] = source[i] for every i whose position p lies in this rank's part."""
    from megatron.core import mpu

    split = getattr(parameter, "tensor_model_parallel", False)
    rank = mpu.get_tensor_model_parallel_rank()
    flat = positions.reshape(-1)
    mine = flat.div(parameter.numel(), rounding_mode="floor") == (
        rank if split else flat[0] // parameter.numel()
    )
    parameter.data.view(-1)[flat[mine] % parameter.numel()] = source.reshape(-1)[mine].to(parameter.dtype)

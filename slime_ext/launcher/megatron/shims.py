"""What megatron-core needs to train without CUDA: small replacements, each with the lines it stands for.

Nothing is faked beyond these lines: any other use of CUDA on a CPU machine still fails loudly. A shim that
megatron no longer needs is deleted here; the ablation test shows that each one still is.
"""

from __future__ import annotations

import types
from functools import cache

import megatron.core
import torch

from slime_ext.errors import ConfigError
from slime_ext.without_cuda.stand_ins.torch_cuda import on_the_cpu

PINNED_VERSION = "0.16.1"


def _with(module: types.ModuleType, **replaced: object) -> types.SimpleNamespace:
    """A module as one importer sees it: these attributes replaced, all others those of the original."""
    return types.SimpleNamespace(**{**vars(module), **replaced})


def current_device() -> None:
    """device=torch.cuda.current_device() in tensor_parallel/mappings.py:91-181, utils.py:631,
    pipeline_parallel/p2p_communication.py:190-202, 313-321, distributed/param_and_grad_buffer.py:783-806,
    models/common/embeddings/rotary_pos_embedding.py:162."""
    torch.cuda.current_device = lambda: torch.device("cpu")


def schedule_zeros() -> None:
    """torch.zeros([], device="cuda") in pipeline_parallel/schedules.py:596, 983, 2138."""
    from megatron.core.pipeline_parallel import schedules

    schedules.torch = _with(torch, zeros=on_the_cpu(torch.zeros))


def shape_exchange() -> None:
    """torch.cuda.synchronize() after the exchange of tensor shapes (micro-batches of different lengths),
    pipeline_parallel/p2p_communication.py:242."""
    from megatron.core.pipeline_parallel import p2p_communication

    p2p_communication.torch = _with(torch, cuda=_with(torch.cuda, synchronize=lambda: None))


def tied_embedding() -> None:
    """weight.data.cuda() before the copy of a tied embedding to the last stage, models/common/
    language_module/language_module.py:244; here both stages load the same weights."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    LanguageModule._is_in_embd_group = lambda self: False


def router_gemm() -> None:
    """te_general_gemm, which transformer/moe/moe_utils.py:1192 asks for and imports with Transformer Engine
    only (:26-38)."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


SHIMS = (current_device, schedule_zeros, shape_exchange, tied_embedding, router_gemm)


@cache
def install() -> None:
    """Installs the CPU shims, once.

    Raises:
        ConfigError: CUDA is present, or megatron-core is not the pinned version.
    """
    if torch.cuda.is_available():
        raise ConfigError("CPU shims: expected a machine without CUDA, got one with it: leave them out there")
    if megatron.core.__version__ != PINNED_VERSION:
        raise ConfigError(
            f"CPU shims: expected megatron-core {PINNED_VERSION}, got {megatron.core.__version__}: "
            f"pip install megatron-core=={PINNED_VERSION}"
        )
    for shim in SHIMS:
        shim()

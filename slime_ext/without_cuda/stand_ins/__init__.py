"""One file per stand-in: what it stands for, which release of which host needs it, how it is installed.

A stand-in that no host needs any longer is deleted; tests/without_cuda shows of each that something fails
without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection

from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.without_cuda.import_hooks import ImportHooks

NAMES = (
    "torch_cuda",
    "accelerator",
    "adam_state",
    "cuda_ipc",
    "free_ports",
    "gloo",
    "hf_weights",
    "mooncake",
    "process_groups",
    "server_args",
    "sglang_fork",
    "sglang_kernels",
    "weight_endpoints",
)


def install(without: Collection[str] = ()) -> None:
    """Registers every stand-in to be put in place when the module that needs it is imported.

    Args:
        without: names to leave out (the tests that show what each is for).

    Raises:
        ConfigError: a name in `without` is unknown.
    """
    for name in without:
        if name not in NAMES:
            raise ConfigError(f"stand-ins: expected one of {NAMES}, got {name!r}{did_you_mean(name, NAMES)}")
    hooks = ImportHooks()
    for name in NAMES:
        if name not in without:
            importlib.import_module(f"{__name__}.{name}").install(hooks)
    hooks.install()

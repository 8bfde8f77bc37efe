"""Directories, ports and programs that the run will use."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.launcher.output import checkpoint
from slime_ext.launcher.output.metrics_log import FILE
from slime_ext.launcher.validation.model import sizes_of

REPOSITORY = Path(__file__).parents[3]
HALF = {"bfloat16": "bf16", "float16": "fp16"}
SGLANG_PYTHON = ".venv-sglang/bin/python"


def check_run(args: argparse.Namespace) -> None:
    """Nothing of another run would be overwritten."""
    continues = bool(args.load) and Path(args.load).resolve() == Path(args.save).resolve()
    if not continues and checkpoint.iterations(args.save):
        raise ConfigError(
            f"--save {args.save}: expected no checkpoint yet, got one: --load it, or save elsewhere"
        )
    if not continues and (Path(args.run_path) / FILE).exists():
        raise ConfigError(
            f"--run-name {args.run_name}: expected a new run, got {args.run_path}/{FILE}: choose another "
            "name, or --load its checkpoints"
        )


def check_load(args: argparse.Namespace) -> None:
    """A sound checkpoint of these sizes is there, and its run is not complete; fills load_iteration."""
    if not args.load:
        return
    done, damaged = checkpoint.newest(args.load, sizes_of(args), args.world_size)
    args.load_iteration = done
    args.notes += damaged
    if done >= args.num_rollout:
        raise ConfigError(
            f"--num-rollout: expected more than the {done} rollouts that --load {args.load} has done, "
            f"got {args.num_rollout}: nothing is left to do"
        )


def check_device(args: argparse.Namespace) -> None:
    """Half precision is trained on CUDA only."""
    if args.params_dtype in HALF and not has_cuda():
        raise ConfigError(
            f"--{HALF[args.params_dtype]}: expected a CUDA device, got none: without one train in float32; "
            "the engine alone may use --sglang-dtype"
        )


def has_cuda() -> bool:
    """Whether a driver shows a device, without importing torch."""
    shown = any(Path(path).exists() for path in ("/proc/driver/nvidia/gpus", "/dev/nvidiactl", "/dev/dxg"))
    return shown and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def check_engine(args: argparse.Namespace) -> None:
    """The server's address, or an interpreter to start one with."""
    if args.sglang_server_url is not None:
        port = re.fullmatch(r"https?://[^/:\s]+(?::(\d{1,5}))?/?", args.sglang_server_url)
        if port is None or int(port[1] or 80) > 65535:
            raise ConfigError(f"--sglang-server-url: expected http://host:port, got {args.sglang_server_url}")
        return
    args.sglang_python = args.sglang_python or default_python()
    if not (Path(args.sglang_python).is_file() and os.access(args.sglang_python, os.X_OK)):
        raise ConfigError(
            f"--sglang-python: expected the interpreter of the SGLang environment, got {args.sglang_python}: "
            "make install creates it"
        )


def default_python() -> str:
    """The SGLang environment here or beside the package, else this interpreter if it has SGLang."""
    for directory in (Path.cwd(), REPOSITORY):
        if (directory / SGLANG_PYTHON).is_file():
            return str(directory / SGLANG_PYTHON)
    return sys.executable if importlib.util.find_spec("sglang") else SGLANG_PYTHON

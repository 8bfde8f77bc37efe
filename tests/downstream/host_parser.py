"""What a host's own parser and ``slime_ext.host.init`` say to launches; run in the host's environment.

``python -m tests.downstream.host_parser slime|miles FILE`` with the host's package on PYTHONPATH: a JSON list
of lists of flags in, a JSON list of ``[who refuses, its line]`` out, ``["", ""]`` where nobody does. Nothing
is started. Left out is what needs the model's files or a device: the checks against the Hugging Face
configuration, but on a rank, Megatron's own and SGLang's; every path exists.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

UNNEEDED = ("sglang_validate_args", "megatron_validate_args", "hf_validate_args", "validate_args")
ENVIRONMENT = {
    "SLIME_EXT_WITHOUT_CUDA": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
}
MEGATRON = ("_hf_validate_args", "validate_args", "_validate_allgather_cp_supported")


def main(package: str, path: str) -> int:
    """Prints the verdicts."""
    print(json.dumps(verdicts(package, json.loads(Path(path).read_text()))))
    return 0


def on_a_rank(package: str, folder: str, launches: list[tuple[str, ...]]) -> list[list[str]]:
    """The verdicts of a host in a folder, with the model's files, in a fork that has imported Megatron."""
    from slime_ext_cpu import stand_ins
    from slime_ext_cpu.stand_ins import torch_cuda

    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, folder)
    torch_cuda.replace()
    stand_ins.install()
    _read_docstrings_once()
    return verdicts(package, launches, with_model=True)


def _read_docstrings_once() -> None:
    """Keeps what Megatron reads in its sources for the help of flags, which takes 0.1 s for each parser."""
    from megatron.training.argument_utils import ArgumentGroupFactory as Factory

    read = Factory._get_field_docstrings
    of_class = functools.cache(lambda of: read(Factory.__new__(Factory), of))
    Factory._get_field_docstrings = lambda factory, of: of_class(of)


def verdicts(package: str, launches: list[tuple[str, ...]], with_model: bool = False) -> list[list[str]]:
    """``[who refuses, its line]`` for each launch."""
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
        parser = importlib.import_module(f"{package}.utils.arguments")
        megatron = importlib.import_module(f"{package}.backends.megatron_utils.arguments")
        startup = importlib.import_module("slime_ext.host.startup")
        for module, names in ((parser, UNNEEDED), (megatron, MEGATRON)):
            for name in names:
                if not hasattr(module, name) or (with_model and "hf_validate" in name):
                    continue
                stack.enter_context(mock.patch.object(module, name, lambda *args, **kwargs: None))
        if hasattr(parser, "sglang_parse_args"):
            stack.enter_context(mock.patch.object(parser, "sglang_parse_args", argparse.Namespace))
        if not with_model:
            stack.enter_context(mock.patch("transformers.AutoConfig.from_pretrained", mock.MagicMock()))
        stack.enter_context(mock.patch("os.path.exists", lambda path: True))
        stack.enter_context(mock.patch("argparse.ArgumentParser.error", refuse))
        logging.disable(logging.CRITICAL)
        return [verdict(parser, startup, flags) for flags in launches]


def refuse(parser, message):
    """In place of argparse's exit, whose reason would be lost."""
    raise ValueError(message)


def verdict(parser, startup, flags):
    """Who refuses a launch with these flags, and how."""
    from slime_ext.errors import ConfigError

    try:
        with mock.patch.object(sys, "argv", ["train.py", *flags]):
            args = parser.parse_args()
    except (Exception, SystemExit) as error:
        return ["host", f"{type(error).__name__}: {error}".splitlines()[0]]
    try:
        startup.init(args)
    except ConfigError as error:
        return ["init", str(error)]
    return ["", ""]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

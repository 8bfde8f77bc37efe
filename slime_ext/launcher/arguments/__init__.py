"""The command line of the launcher, in slime's and Megatron's spelling. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slime_ext.launcher.arguments.parser import build_parser, parse
from slime_ext.launcher.arguments.resolve import resolve

__all__ = ["build_parser", "parse_args"]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags and files to one namespace with slime's attribute names, open values filled in.

    Beside the flags it has: notes (lines to print), slime_ext (the mapping under that key, or None),
    world_size, data_parallel_size, eval_datasets (pairs of name and path), run_path, tensorboard_dir.
    Reads no prompt file and no model: `validation.validate` does.

    Raises:
        ConfigError: one line with the flag or key, what was expected and what came.
    """
    return resolve(parse(list(sys.argv[1:] if argv is None else argv)))

"""What the sub-commands print: rich on a terminal, plain text anywhere else."""

from __future__ import annotations

from typing import Any

import yaml
from rich.console import Console

INLINE = 88


def console(*, stderr: bool = False) -> Console:
    """Wide enough for a pipe to keep one line per row."""
    found = Console(highlight=False, stderr=stderr)
    return found if found.is_terminal else Console(highlight=False, stderr=stderr, width=200)


def yaml_of(value: Any) -> str:
    """YAML in the order of the mapping, small mappings on one line."""
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=INLINE).rstrip()


def needs(correction: Any) -> str:
    """What a correction needs from the host beside log-probs and masks."""
    found = {
        "cur_log_probs": correction.needs_target,
        "advantages": correction.needs_advantages,
        "whole step": correction.needs_plan,
    }
    return ", ".join(name for name, is_needed in found.items() if is_needed) or "-"

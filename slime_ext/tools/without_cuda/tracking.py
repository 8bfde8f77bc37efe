"""What a host logs, written down as JSON in the processes that log it.

`sitecustomize` calls `install` where the variable names a file; each line is {"axis", "metrics"}.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_ext.tools.without_cuda.import_hooks import ImportHooks
from slime_ext.tools.without_cuda.stand_ins import HOSTS

FILE = "SLIME_EXT_TRACKING"
MODULES = ("utils.tracking_utils", "utils.logging_utils", "observability.logging_utils")  # by release


def install() -> None:
    """Registers with the hooks that the stand-ins have installed in this process."""
    hooks = next(finder for finder in sys.meta_path if isinstance(finder, ImportHooks))
    for host in HOSTS:
        for module in MODULES:
            hooks.add("after", f"{host}.{module}", _also_write)


def _also_write(module: ModuleType) -> None:
    log = getattr(module, "log", None)
    if log is None:  # of releases in which another module has it
        return

    @functools.wraps(log)
    def logged(args: Any, metrics: dict[str, Any], step_key: str) -> None:
        log(args, metrics, step_key)
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        line = json.dumps({"axis": step_key, "metrics": numbers}) + "\n"
        with Path(os.environ[FILE]).open("a") as file:
            file.write(line)

    module.log = logged


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True

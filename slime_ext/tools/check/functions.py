"""Whether the functions that a launch's flags name are there, without importing any."""

from __future__ import annotations

import sys
from pathlib import Path

from slime_ext.errors import ConfigError, cut, did_you_mean
from slime_ext.host import contract
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import ARGUMENTS, FUNCTION
from slime_ext.host.rules import Setup
from slime_ext.tools.check.veil import Veiled
from slime_ext.tools.checkout import signature_of
from slime_ext.tools.scripts.launch import Launch
from slime_ext.tools.scripts.modules import fault_of, file_of


def check_functions(setup: Setup, launch: Launch) -> None:
    """Raises ConfigError for a function that does not exist, or that the wrong flag names."""
    named = {
        dest: getattr(setup.args, dest, None)
        for dest, argument in ARGUMENTS.items()
        if argument.kind is FUNCTION
    }
    for dest, function in named.items():
        is_ours = dest in (*contract.OURS, "custom_tis_function_path")
        if function and not (function.startswith("slime_ext") and is_ours):
            _check_function(dest, function, setup, launch)
    for dest, ours in contract.OURS.items():
        function = named.get(dest) or ours
        if function.startswith("slime_ext") and function != ours:
            near = did_you_mean(function, [ours])
            raise ConfigError(f"{flag_of(dest)}: expected {ours} of slime_ext, got '{cut(function)}'{near}")


def _check_function(dest: str, function: str, setup: Setup, launch: Launch) -> None:
    """Raises ConfigError for a function of the user's own that is no dotted path, or that a package which is
    seen from here does not define; a hook must take the keywords that the host calls it with."""
    script = Path(launch.script).resolve() if launch.script else None
    near = [script.parent] if script else []
    near += [launch.root] if launch.root else []
    folders = [Path.cwd(), *near, *map(Path, sys.path)]
    if fault := fault_of(function, folders):
        fault = "it is not there" if isinstance(function, Veiled) else fault
        raise ConfigError(
            f"{flag_of(dest)}: expected package.module.function, got '{cut(function)}': {fault}"
        )
    module, _, name = function.rpartition(".")
    file = file_of(module, folders) if dest == "custom_tis_function_path" else None
    if file and (signature := signature_of(file.read_text("utf-8", "ignore"), name)):
        more = contract.OPTIONAL if setup.host and setup.host.passes("cur_log_probs") else ()
        contract.require_keywords(function, signature, (*contract.REQUIRED, *more))

"""Makes the correction that a run's flags and its ``slime_ext:`` mapping describe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_ext.config.files import read_yaml
from slime_ext.core.centering import Center
from slime_ext.errors import ConfigError, warn_once
from slime_ext.host.current import current_host
from slime_ext.host.wrapping import is_wrapped
from slime_ext.hosts import running
from slime_ext.hosts.contract import INIT_FLAG
from slime_ext.hosts.flags import check_keys, check_kinds
from slime_ext.hosts.running import source_of
from slime_ext.rules.configuration import loaded_from, named_function
from slime_ext.rules.judge import ALL, OF_THE_CORRECTION, enforce
from slime_ext.rules.setup import Setup

LATE = (
    f"slime_ext: expected {INIT_FLAG} at start-up, got a first hook call without it: add the flag, because "
    "the configuration is checked only now, after the first rollout, and there are no guards and no metrics "
    "except those that the host logs itself (miles' --train-backend fsdp never calls it: use megatron)"
)


def setup_for(args: Any, function: str | None = None) -> Setup:
    """Loads and checks the setup of a run: flags, mapping and host.

    Args:
        function: a function of ``slime_ext.tis``: ``correct``; one of ``contract.SLIME_FUNCTIONS``, which
            take their bounds from the host's flags; or a preset, to which the mapping may only add. None: the
            function that the flags name, whether or not the host calls it.

    Raises:
        ConfigError: there is no configuration, it does not load, or it breaks a rule.
    """
    function, host = named_function(args) if function is None else function, current_host()
    is_late = bool(function) and host is not None and not is_wrapped(host)
    if is_late:
        warn_once(LATE)
        check_kinds(args)
    is_init = host is not None and is_wrapped(host)
    is_ours = bool(function) or getattr(args, "slime_ext", None) is not None or is_init
    file, loss_type = _keys_of_file(args, is_ours=is_ours), _loss_type(args, host)
    trains = host is None or is_init  # without init, the flags alone tell what reaches the hook
    setup = Setup(
        args,
        function,
        file=file,
        pg_loss_type=loss_type,
        host=host,
        trains=trains,
        environment=os.environ,
        custom_loss=source_of(getattr(args, "custom_loss_function_path", None)),
    )
    setup = loaded_from(setup)
    enforce(setup, ALL if is_late else OF_THE_CORRECTION)
    for note in setup.loaded.notes:
        warn_once(f"slime_ext: {note}")
    return setup


def _loss_type(args: Any, host: running.Host | None) -> str | None:
    """Asks the host's ``get_pg_loss_type``. Returns None if the host has no such function."""
    says = getattr(host.loss, "get_pg_loss_type", None) if host else None
    try:
        return says(args) if says else None
    except ValueError as error:  # a file set a value that the host's parser would refuse
        raise ConfigError(f"--pg-loss-type: {error}") from None


def _keys_of_file(args: Any, *, is_ours: bool) -> tuple[str, ...]:
    """Reads the top-level keys of --custom-config-path, if slime_ext runs and the file is here.

    Raises:
        ConfigError: a key is misspelt, so that slime ignores it.
    """
    path = getattr(args, "custom_config_path", None)
    if not (is_ours and isinstance(path, str) and Path(path).is_file()):
        return ()
    content = read_yaml(path, where := f"--custom-config-path {path}")
    keys = tuple(map(str, content)) if isinstance(content, Mapping) else ()
    check_keys(where, keys)
    return keys


def center_of_flags(args: Any) -> Center | None:
    """Returns the ``center`` of the correction that the flags name.

    It reads no file and asks no host, because the rollout's process calls it for each sample.
    """
    return loaded_from(Setup(args, named_function(args))).loaded.correction.center

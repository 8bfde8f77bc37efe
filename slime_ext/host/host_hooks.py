"""Brings ``cur_log_probs`` and ``advantages`` from a stock host's policy loss to the hook that it calls.

Up to 624b824 slime's policy loss has both at hand and passes neither. ``install`` puts a wrapper around two
globals of the host's loss module: ``policy_loss_function``, whose batch holds the advantages (and the padded
lengths of --qkv-format bshd), and ``get_log_probs_and_entropy``, which makes the log-probs that carry the
gradient. While the wrapped policy loss runs, ``HookCall.of`` adds them to a hook call. What the host
passes itself is used as it is.

The held values belong to one call of the policy loss: a second run under ``--recompute-loss-function`` holds
its own, in whichever thread it runs, and nothing survives the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext.host import hosts
from slime_ext.host.contract import carried

WRAPPED = ("policy_loss_function", "get_log_probs_and_entropy")
MARK = "_carries_for_slime_ext"


def install() -> bool:
    """Wraps the loss of the host that this process belongs to; again is once.

    Returns:
        Whether there is a host; without one (the embedded launcher) the caller passes everything itself.

    Raises:
        ConfigError: the host's loss module has not the functions of any release that is known.
    """
    host = hosts.current()
    if host is None:
        return False
    module = host.loss_module()
    missing = [name for name in WRAPPED if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigError(
            f"{host.loss}: expected {' and '.join(WRAPPED)}, got no {missing[0]}: this {host.name} is "
            "not known; add the lines of docs/patches.md by hand and drop --custom-megatron-init-path"
        )
    for name, wrap in zip(WRAPPED, (_holding, _recording), strict=True):
        if not hasattr(getattr(module, name), MARK):
            setattr(module, name, _marked(wrap(getattr(module, name)), getattr(module, name)))
    return True


def is_installed() -> bool:
    """Whether the loss of this process's host is wrapped."""
    host = hosts.current()
    return host is not None and hasattr(getattr(host.loss_module(), WRAPPED[0], None), MARK)


def uninstall(module: ModuleType) -> None:
    """Puts the host's own functions back; for tests."""
    for name in WRAPPED:
        if original := getattr(getattr(module, name), MARK, None):
            setattr(module, name, original)


def _holding(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def policy_loss_function(*args: Any, **kwargs: Any) -> Any:
        batch = kwargs["batch"] if "batch" in kwargs else args[1]
        token = carried.set({"advantages": batch["advantages"], "max_seq_lens": batch.get("max_seq_lens")})
        try:
            return function(*args, **kwargs)
        finally:
            carried.reset(token)

    return policy_loss_function


def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def get_log_probs_and_entropy(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        held = carried.get()
        if held is not None:  # inside the policy loss; elsewhere it scores tokens for others
            made = result[1] if isinstance(result, tuple) else result  # a bare dict up to v0.2.2 and in miles
            held["cur_log_probs"] = list(made["log_probs"])
        return result

    return get_log_probs_and_entropy


def _marked(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    setattr(wrapper, MARK, original)
    return wrapper

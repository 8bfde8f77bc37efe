"""Records what a host does in a rehearsal, as lines of JSON.

`install` runs in every process. When a watched call returns or raises, it adds a line to its process's file:
{"event", "error"?, "at"?, ...}. Functions that flags name are watched from where the host loads them
(``utils/misc.py``, ``load_function``). `read` returns the lines after the rehearsal has ended.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_ext_cpu.import_hooks import ImportHooks, around
from slime_ext_cpu.stand_ins import HOSTS

FOLDER = "SLIME_EXT_REHEARSE_EVENTS"
Describe = Callable[[tuple[Any, ...], Mapping[str, Any], Any], dict[str, Any]]


def install() -> None:
    """Adds the watchers to the import hooks that the stand-ins installed in this process."""
    hooks = next(finder for finder in sys.meta_path if isinstance(finder, ImportHooks))
    for host in HOSTS:
        for module, name, event, describe in WATCHED:
            hooks.add("after", f"{host}.{module}", _watching(name, event, describe))
        hooks.add("after", f"{host}.utils.misc", _watch_loaded)


def record(event: str, **facts: Any) -> None:
    """Appends a line to this process's file."""
    with Path(os.environ[FOLDER], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n")


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of all processes, and those of each process in their order.

    Skips a line that a killed process left incomplete.
    """
    for file in sorted(folder.glob("*.jsonl"), key=lambda file: file.stat().st_mtime):
        for line in file.read_text().split("\n"):
            with suppress(ValueError):
                yield json.loads(line)


def _watching(name: str, event: str, describe: Describe) -> Callable[[ModuleType], None]:
    def watch(module: ModuleType) -> None:
        owner: Any = module
        *path, last = name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        if (call := getattr(owner, last, None)) is not None:
            setattr(owner, last, watched(call, event, describe))

    return watch


def watched(call: Callable[..., Any], event: str, describe: Describe, **facts: Any) -> Callable[..., Any]:
    """Wraps a function so that it also records what ``describe`` says about each call."""

    @contextmanager
    def failures() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
            source = inspect.getsourcefile(inspect.unwrap(call))
            in_its_file = [f for f in frames if f.filename == source] or frames
            at = f"{in_its_file[-1].filename}:{in_its_file[-1].lineno}" if in_its_file else ""
            record(event, error=f"{type(error).__name__}: {error}"[:500], at=at, **facts)
            raise

    @functools.wraps(call)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with failures():
            result = call(*args, **kwargs)
        record(event, **facts, **describe(args, kwargs, result))
        return result

    @functools.wraps(call)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with failures():
            result = await call(*args, **kwargs)
        record(event, **facts, **describe(args, kwargs, result))
        return result

    return awaited if inspect.iscoroutinefunction(call) else plain


def _watch_loaded(module: ModuleType) -> None:
    """Watches every function that a flag names, and records the flag's path."""

    @around(module, "load_function")
    def load_function(load: Any, path: str | None) -> Any:
        loaded = load(path)
        return watched(loaded, "function", _of_hook, path=path) if inspect.isfunction(loaded) else loaded


def _of_hook(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """Counts sequences, tokens and non-finite log-ratios of a call of the policy loss hook.

    Returns {} for other functions.
    """
    if "rollout_log_probs" not in kwargs:
        return {}
    import torch

    train, rollout = (kwargs[name] for name in ("train_log_probs", "rollout_log_probs"))
    facts = {"sequences": len(kwargs["response_lengths"]), "names": sorted(result[2])}
    if train is None or rollout is None:
        return facts
    masks = torch.cat([torch.as_tensor(mask) for mask in kwargs["loss_masks"]])
    log_ratio = torch.cat(list(train)).detach() - torch.cat(list(rollout))
    return {**facts, "tokens": int(masks.sum()), "nonfinite": int((~log_ratio.isfinite()).sum())}


def _of_actor(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> dict[str, Any]:
    chunks = getattr(args[0], "model", None) or []
    return {"parameters": sum(p.numel() for chunk in chunks for p in chunk.parameters())}


def _of_push(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> dict[str, Any]:
    return {"version": getattr(getattr(args[0], "weight_updater", None), "weight_version", None)}


def _of_step(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> dict[str, Any]:
    losses, norm = result[:2]
    numbers = {name: _number(value) for name, value in losses.items()}
    return {"rollout": args[1], "step": args[2], "losses": numbers, "norm": _number(norm)}


def _number(value: Any) -> float | str | None:
    """Converts a value to a number for JSON, and NaN or infinity to text."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _of_parser(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> dict[str, Any]:
    names = ("advantage_estimator", "use_tis", "get_mismatch_metrics", "custom_tis_function_path")
    return {name: getattr(result, name, None) for name in names}


WATCHED: tuple[tuple[str, str, str, Describe], ...] = (
    ("utils.arguments", "parse_args", "parsed", _of_parser),
    ("backends.megatron_utils.actor", "MegatronTrainRayActor.init", "model", _of_actor),
    ("backends.megatron_utils.actor", "MegatronTrainRayActor.update_weights", "push", _of_push),
    ("backends.megatron_utils.model", "train_one_step", "step", _of_step),
    ("backends.megatron_utils.loss", "vanilla_tis_function", "vanilla", _of_hook),
    ("backends.training_utils.loss", "vanilla_tis_function", "vanilla", _of_hook),
    ("backends.training_utils.loss_hub.losses", "vanilla_tis_function", "vanilla", _of_hook),
    ("backends.sglang_utils.sglang_engine", "SGLangEngine.init", "engine", lambda *_: {}),
)

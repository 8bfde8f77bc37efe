"""Finds the host whose code this process has loaded, and what of it slime_ext wraps."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from slime_ext.hosts.code import LOSS, STEP, TRAIN, Door, HostCode

log = logging.getLogger("slime_ext")
BACKENDS = ".backends."  # where every known host has its trainers


def loaded(part: str = "") -> Iterator[ModuleType]:
    """Yields the loaded modules whose names contain ``part``. A trainer has loaded 5,000."""
    among: list[object] = list(sys.modules.values())  # no pairs: garbage collection costs 5 ms
    if part:
        among = [sys.modules.get(name) for name in list(sys.modules) if part in name]
    # One by one, because each is far apart in memory: going through them twice takes twice as long.
    return (module for module in among if isinstance(module, ModuleType))


def modules(package: str) -> list[ModuleType]:
    """Lists the loaded modules of a package."""
    return [module for module in loaded(package) if package == module.__name__.partition(".")[0]]


def definers(name: str, among: Iterable[ModuleType]) -> list[ModuleType]:
    """Lists the modules that define a function ``name``."""
    return [
        module
        for module in among
        if name in module.__dict__  # first, because nearly all modules end here
        and isinstance(function := module.__dict__[name], FunctionType)
        and function.__module__ == module.__name__
    ]


def find_function(package: str, name: str) -> Callable[..., Any] | None:
    """Returns the function ``name`` that a loaded module of a package defines."""
    return next((getattr(module, name) for module in definers(name, modules(package))), None)


@dataclass(frozen=True)
class Host(HostCode):
    """Represents a framework with slime's hooks, as loaded in this process.

    Args:
        loss: the module in whose globals the policy loss looks its functions up.
        step: the module that defines ``train_one_step``; None if the trainer has no such function (FSDP).
    """

    loss: ModuleType
    step: ModuleType | None

    @property
    def name(self) -> str:
        return self.loss.__name__.partition(".")[0]

    @property
    def loss_module(self) -> str:
        return self.loss.__name__

    def door(self, name: str) -> Door | None:
        module = self.step if name == STEP else self.loss
        function = getattr(module, name, None)
        if module is None or not callable(function):
            return None
        return Door(module.__name__, tuple(inspect.signature(function).parameters))

    def defines(self, name: str) -> bool:
        return find_function(self.name, name) is not None

    def accepts(self, dest: str, args: Any) -> bool:
        return hasattr(args, dest)

    def loss_text(self) -> str:
        return source(self.loss)

    def near_texts(self) -> Iterator[str]:
        room = self.loss.__name__.rpartition(".")[0]
        return (source(module) for module in loaded(room) if module.__name__.startswith(room))

    def texts(self) -> Iterator[str]:
        folders = sys.modules[self.name].__path__
        return (path.read_text("utf-8", "ignore") for f in folders for path in Path(f).rglob("*.py"))


def source(module: ModuleType) -> str:
    """Reads the source of a module. Returns an empty text if it has no Python file."""
    path = getattr(module, "__file__", None)
    return Path(path).read_text("utf-8", "ignore") if path and Path(path).suffix == ".py" else ""


def source_of(path: str | None) -> str | None:
    """Reads the source of the module of ``package.module.function``. Returns None if it is not here.

    It imports the packages around the module, and not the module.
    """
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        spec = importlib.util.find_spec((path or "").rpartition(".")[0])
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            return Path(spec.origin).read_text("utf-8", "ignore")
    return None


def current() -> Host | None:
    """Finds the host whose training code this process has loaded. Returns None outside a host.

    If several modules define a policy loss (a user's module may), the host is the package that also defines
    the optimizer step.
    """
    # Of 5,000 modules, all names take 0.2 ms, and all that they define take 4 ms.
    for part in (BACKENDS, ""):
        losses = definers(LOSS, loaded(part))
        for loss in losses:
            for step in definers(STEP, modules(loss.__name__.partition(".")[0])):
                return Host(loss, step)
    return Host(losses[0], None) if losses else None


def weight_updaters(host: Host | None) -> Iterator[type]:
    """Yields the host's classes that push weights to the engines and count the pushes."""
    for module in modules(host.name) if host else ():
        for cls in list(vars(module).values()):
            if isinstance(cls, type) and cls.__module__ == module.__name__ and hasattr(cls, "update_weights"):
                code = getattr(inspect.unwrap(inspect.getattr_static(cls, "__init__")), "__code__", None)
                if code is not None and "weight_version" in code.co_names:
                    yield cls


def trainers(host: Host) -> Iterator[tuple[type, str]]:
    """Yields each method of ``TRAIN`` with the host's class, or its subclass, that defines it itself.

    Subclasses count, because Ray subclasses an actor's class and wraps each method there.
    """
    for module in modules(host.name):
        for cls in list(vars(module).values()):
            if isinstance(cls, type) and cls.__module__ == module.__name__:
                for one in (cls, *_below(cls)):
                    yield from ((one, name) for name in TRAIN if name in vars(one))


def _below(cls: type) -> Iterator[type]:
    """Yields the subclasses of a class, and their subclasses."""
    subclasses: list[type] = type.__subclasses__(cls)
    for each in subclasses:
        yield from (each, *_below(each))


def command_line() -> list[str]:
    """Returns the words that started the run. In a Ray actor they are the driver's."""
    if (ray := sys.modules.get("ray")) is None:
        return sys.argv
    try:
        if not ray.is_initialized():  # asking for its context would start a new Ray
            return sys.argv
        job_id = ray.get_runtime_context().get_job_id()
        words = next(job["Entrypoint"] for job in ray._private.state.jobs() if job["JobID"] == job_id)
        return str(words).split()
    except Exception:  # this is no public interface, so another release of Ray may keep it elsewhere
        log.debug("the driver's command line is not known", exc_info=True)
        return sys.argv

"""Reads the code of a host's checkout without importing it. Commands use it before the host runs."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from slime_ext.errors import ConfigError
from slime_ext.hosts.code import LEADING, LOSS, TARGET, Door, HostCode
from slime_ext.hosts.contract import flag_of
from slime_ext.tools.folders import is_file, is_folder

PROGRAM, ROOM = "train.py", "backends"  # a file beside a checkout's package, and a folder inside the package

FLAG = re.compile(r"[\"'](--[a-z][a-z0-9-]*)[\"']")


class Checkout(HostCode):
    """The code of a host's package.

    Args:
        package: the package's folder, ``CHECKOUT/slime`` or the folder of an installed package.
    """

    def __init__(self, package: Path) -> None:
        self.package = package

    @property
    def name(self) -> str:
        return self.package.name

    @cached_property
    def files(self) -> dict[str, str]:
        """Reads the text of each module, by the module's name."""
        paths = sorted(path for path in self.package.rglob("*.py") if is_file(path))
        return {self._module(path): path.read_text("utf-8", "ignore") for path in paths}

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.package.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def door(self, name: str) -> Door | None:
        """Finds the door of that name. If several modules define it, returns the door that fits best.

        ``TARGET`` must be visible in the module of the policy loss, which may import it.
        """
        modules, leading, doors = self._defining(name), LEADING[name], list[Door]()
        if name == TARGET and self.loss_module in modules:
            modules = [self.loss_module]
        elif name == TARGET and not _imports(self.loss_text(), name):
            return None
        for module in modules:
            if signature := signature_of(self.files[module], name):
                where = self.loss_module if name == TARGET else module
                doors.append(Door(where, tuple(signature.parameters)))
        return max(doors, key=lambda door: door.parameters[: len(leading)] == leading, default=None)

    def _defining(self, name: str) -> list[str]:
        line = re.compile(rf"^def {name}\(", re.MULTILINE)
        return [module for module, text in self.files.items() if line.search(text)]

    def defines(self, name: str) -> bool:
        return bool(self._defining(name))

    def accepts(self, dest: str, args: Any) -> bool:
        return any(f'"{flag_of(dest)}"' in text for text in self.files.values())

    def flags(self) -> frozenset[str]:
        return self._flags

    @cached_property
    def _flags(self) -> frozenset[str]:
        patches = self.package.parent.glob("docker/**/*.patch")  # what slime's image adds to Megatron
        texts = [*self.texts(), *(path.read_text("utf-8", "ignore") for path in patches)]
        return frozenset(name for text in texts for name in FLAG.findall(text))

    @cached_property
    def loss_module(self) -> str:
        door = self.door(LOSS)
        return self.name if door is None else door.module

    def loss_text(self) -> str:
        return self.files.get(self.loss_module, "")

    def near_texts(self) -> Iterator[str]:
        room = self.loss_module.rpartition(".")[0]
        return (text for module, text in self.files.items() if module.startswith(room))

    def texts(self) -> Iterator[str]:
        return iter(self.files.values())


def _imports(text: str, name: str) -> bool:
    """Returns whether a module's top level imports a name from another module."""
    imports = (node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom))
    return any((alias.asname or alias.name) in (name, "*") for node in imports for alias in node.names)


def checkout_in(folder: Path) -> Checkout | None:
    """Returns the host whose checkout a folder is, or None if it is no checkout."""
    if not is_file(folder / PROGRAM):
        return None
    rooms = (room for room in sorted(folder.glob(f"*/{ROOM}")) if is_folder(room))
    return next((Checkout(room.parent) for room in rooms), None)


def named_checkout(path: str) -> Checkout:
    """Returns the host in the folder that ``--host`` names. Raises ConfigError if there is none."""
    checkout = checkout_in(Path(path).absolute())
    if checkout is None:
        raise ConfigError(
            f"--host {path}: expected a checkout of slime or miles, got no {PROGRAM} beside a package with "
            f"{ROOM}/ there: name the folder that git cloned"
        )
    return checkout


@lru_cache(maxsize=64)  # the rules ask for the same few functions dozens of times
def signature_of(text: str, name: str) -> inspect.Signature | None:
    """Reads the signature of a module's function from its text, without annotations.

    Each default is an ellipsis. Returns None if the text is not Python, or does not define the function at
    its top level.

    >>> signature_of("def f(a, b=1, *, c, **more): ...", "f")
    <Signature (a, b=Ellipsis, *, c, **more)>
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    functions = (node for node in reversed(body) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    arguments = next((node.args for node in functions if node.name == name), None)
    if arguments is None:
        return None
    kinds, empty = inspect.Parameter, inspect.Parameter.empty
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=empty if i < required else ...,
        )
        for i, argument in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = empty if default is None else ...
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=value))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)

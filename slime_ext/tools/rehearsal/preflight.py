"""Mistakes of a launch that its text shows, before a process starts."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_ext.tools.rehearsal.replace import Sizes, group_of, kept, sizes_of
from slime_ext.tools.rehearsal.twin import has_chat_template, tokenizer_files
from slime_ext.tools.scripts.launch import Launch, Unread, WrittenFlag
from slime_ext.tools.scripts.modules import fault_of, is_here
from slime_ext.tools.scripts.trace import MAPPING

NAME = re.compile(r"--[a-z][a-z0-9_-]*")
NEARLY = 0.8  # likeness from which a name is a misspelling of another
SIZES = tuple(
    f"--{name}"
    for name in "rollout-batch-size n-samples-per-prompt global-batch-size num-steps-per-rollout".split()
)
ELSEWHERE = ("--sglang-", "--router-")  # checked by the SGLang of the cluster
MEGATRON = (
    "training/arguments.py",
    "training/*config*.py",
    "training/config/*.py",
    "core/*config*.py",
    "core/*/*config*.py",
)
HOST = ("utils/arguments.py", "backends/**/arguments.py")


def known_flags(host: Path, megatron: Path) -> set[str]:
    """The flags that a host's parser has, read from the sources of the host's package and of Megatron.

    Args:
        host: folder of the package slime or miles.
        megatron: folder of the package megatron.
    """
    files = [f for pattern in HOST for f in host.glob(pattern)]
    files += [f for pattern in MEGATRON for f in megatron.glob(pattern)]
    patches = host.parent.glob("docker/**/*.patch")  # what slime's image adds to Megatron
    added = {name for file in patches for name in re.findall(r"['\"](--[a-z][a-z0-9-]*)", file.read_text())}
    return added | {name for file in files for name in _names(ast.parse(file.read_text()))}


def _names(tree: ast.AST) -> Iterator[str]:
    """Words such as --lr, and what Megatron makes of the fields of its configurations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.ClassDef):
            fields = [
                s.target.id
                for s in node.body
                if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
            ]
            yield from (
                f"--{sign}{name.replace('_', '-')}" for name in fields for sign in ("", "no-", "disable-")
            )


def unknown_flags(flags: Sequence[WrittenFlag], known: set[str]) -> Iterator[tuple[WrittenFlag, str]]:
    """(flag, nearest known name or nothing) for every flag that the host passes over or refuses."""
    for flag in dict.fromkeys(flags):
        plain = flag.name.replace("--no-", "--", 1)
        if not ({flag.name, plain} & known or flag.name.startswith(ELSEWHERE)):
            near = difflib.get_close_matches(flag.name, known, n=1, cutoff=NEARLY)
            yield flag, near[0] if near else ""


def mistakes(launch: Launch, known: set[str], paths: Sequence[Path], *, is_own_host: bool) -> Iterator[str]:
    """One line for each mistake.

    Args:
        known: of ``known_flags``.
        paths: where Python looks for modules in the run.
        is_own_host: whether the host is the script's own, so that a flag that it lacks is a mistake.
    """
    if not launch.flag("--hf-checkpoint") and launch.is_known("--hf-checkpoint"):
        script, count = Path(launch.script).name, len(launch.flags)
        yield f"{script}: --hf-checkpoint: expected in the launch, got none among its {count} flags"
    yield from _unknown(launch, known, is_own_host=is_own_host)
    yield from _arithmetic(launch, sizes_of(launch))
    yield from _tokenizer(launch)
    yield from _of_a_shell(launch)
    functions = (flag for flag in launch.flags if flag.name.endswith("-path") and flag.values)
    yield from filter(None, (_function(flag, paths) for flag in functions))


def _unknown(launch: Launch, known: set[str], *, is_own_host: bool) -> Iterator[str]:
    for flag, near in unknown_flags(launch.flags, known):
        if near:
            yield f"{flag.where}: {flag.name}: the host has no such flag; did you mean {near}?"
        elif is_own_host:
            yield f"{flag.where}: {flag.name}: the host has no such flag: nothing reads it"


def _of_a_shell(launch: Launch) -> Iterator[str]:
    for flag in kept(launch):
        for word in flag.values:
            if isinstance(word, Unread):
                yield (
                    f"{flag.where}: {flag.name}: expected a value that the script says, got '{word}': "
                    "export it"
                )
    for gap in launch.gaps:
        if gap.names is None or any(group_of(name) is None for name in gap.names):
            yield f"{gap}; nothing is rehearsed until the script says it"


def _arithmetic(launch: Launch, sizes: Sizes) -> Iterator[str]:
    if not all(map(launch.is_known, SIZES)):
        return
    where = flag.where if (flag := launch.flag("--global-batch-size")) else Path(launch.script).name
    total = sizes.prompts * sizes.samples
    if not sizes.batch or total % sizes.batch:
        yield (
            f"{where}: --global-batch-size: expected a divisor of --rollout-batch-size x "
            f"--n-samples-per-prompt = {sizes.prompts} x {sizes.samples} = {total}, got {sizes.batch}: "
            f"{total % max(sizes.batch, 1)} samples of each rollout would train nothing"
        )


def _tokenizer(launch: Launch) -> Iterator[str]:
    flag, folder = launch.flag("--apply-chat-template"), Path(launch.value("--hf-checkpoint"))
    if flag and tokenizer_files(folder) and not has_chat_template(folder):
        yield (
            f"{flag.where}: --apply-chat-template: expected a tokenizer with a chat template, got none in "
            f"{folder}: leave the flag out, or give the chat model's folder"
        )


def _function(flag: WrittenFlag, paths: Sequence[Path]) -> str | None:
    """What is wrong with a flag's module.function, as far as a file shows it."""
    path = flag.values[0]
    if "." not in path or "/" in path or path.endswith(MAPPING) or isinstance(path, Unread):
        return None
    expected = f"{flag.where}: {flag.name}: expected module.function that Python finds, got '{path}'"
    if not is_here(path, paths):
        module = path.rpartition(".")[0]
        return (
            f"{expected}: no module {module} below the launch's PYTHONPATH, the script's folder or the host's"
        )
    fault = fault_of(path, paths)
    return f"{expected}: {fault}" if fault else None

"""Finds the mistakes that the text of a launch shows, before a process starts."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.tools.launch.launch import Launch, Unread, WrittenFlag
from slime_ext.tools.launch.trace import MAPPING
from slime_ext.tools.modules import fault_of, is_here
from slime_ext_cpu.rehearsal.refused import refusals
from slime_ext_cpu.rehearsal.replace import Sizes, group_of, kept, sizes_of
from slime_ext_cpu.rehearsal.twin import has_chat_template, tokenizer_fault, tokenizer_files

NAME = re.compile(r"--[a-z][a-z0-9_-]*")
SHORT = re.compile(r"-[A-Za-z]\S*")  # never a value for argparse
NEARLY = 0.8  # two names with at least this similarity are spellings of the same name
SIZES = tuple(
    f"--{name}"
    for name in "rollout-batch-size n-samples-per-prompt global-batch-size num-steps-per-rollout".split()
)
SWITCH = "switch"
WANTED = {
    "int": "a whole number",
    "float": "a number",
    "word": "a value",
    "words": "a value",
    "file": "a file or folder",
}
NEEDED = dict.fromkeys([*SIZES, "--micro-batch-size", "--rollout-max-response-len"], "int") | {
    "--hf-checkpoint": "file",
    "--prompt-data": "file",
    "--eval-prompt-data": "words",
}  # the kinds of flags that a rehearsal needs; each number must be at least 1
ENGINE = "--sglang-"
ELSEWHERE = (ENGINE, "--router-")  # flags of the cluster's SGLang, which may be another version
MEGATRON = (
    "training/arguments.py",
    "training/*config*.py",
    "training/config/*.py",
    "core/*config*.py",
    "core/*/*config*.py",
)
HOST = ("utils/arguments.py", "backends/**/arguments.py")
SGLANG = ("server_args.py", "arg_groups/fields/*.py")


def known_flags(host: Path, megatron: Path) -> dict[str, str]:
    """Reads the flags of a host's parser from the sources of host and Megatron.

    Args:
        host: folder of the package slime or miles.
        megatron: folder of the package megatron.

    Returns:
        the kind of each flag: a key of ``WANTED``, ``SWITCH``, "open", or "" if the sources say none or
        several.

    Raises:
        ConfigError: a source is not valid Python.
    """
    files = [f for pattern in HOST for f in host.glob(pattern)]
    files += [f for pattern in MEGATRON for f in megatron.glob(pattern)]
    patches = host.parent.glob("docker/**/*.patch")  # what slime's image adds to Megatron
    added = {name for file in patches for name in re.findall(r"['\"](--[a-z][a-z0-9-]*)", file.read_text())}
    trees = [_parsed(file) for file in files]
    kinds: dict[str, set[str]] = {name: set() for name in added}
    for name, kind in (pair for tree in trees for pair in [*((n, "") for n in _names(tree)), *_kinds(tree)]):
        kinds.setdefault(name, set()).update({kind} - {""})
    return {name: of_name.pop() if len(of_name) == 1 else "" for name, of_name in kinds.items()}


def _parsed(file: Path) -> ast.AST:
    try:
        return ast.parse(file.read_bytes(), file.name)
    except (SyntaxError, ValueError) as error:  # ValueError: a zero byte
        raise ConfigError(f"{file}: expected Python, got {error}: fix the host's checkout") from None


def _kinds(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (flag, kind) of each call that adds an argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("add_argument", "reset_arg")):
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            keywords = {str(keyword.arg): ast.unparse(keyword.value) for keyword in node.keywords}
            yield from ((name, _kind(keywords)) for name in names if isinstance(name, str))


def _kind(keywords: Mapping[str, str]) -> str:
    """Returns the kind of an argument with these keywords; "open" if it is unclear."""
    if keywords.get("action") in ("'store_true'", "'store_false'"):
        return SWITCH
    if keywords.keys() & {"action", "None"} or keywords.get("nargs", "'+'") != "'+'":
        return "open"
    if "nargs" in keywords:
        return "words"
    return keywords["type"] if keywords.get("type") in ("int", "float") else "word"


def _names(tree: ast.AST) -> Iterator[str]:
    """Yields words such as --lr, and the flags of fields in Megatron's configurations."""
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


def unknown_flags(
    flags: Sequence[WrittenFlag], known: Mapping[str, str]
) -> Iterator[tuple[WrittenFlag, str]]:
    """Yields (flag, nearest known name or "") for flags that the host ignores or refuses."""
    for flag in dict.fromkeys(flags):
        plain = flag.name.replace("--no-", "--", 1)
        if not ({flag.name, plain} & known.keys() or flag.name.startswith(ELSEWHERE)):
            near = difflib.get_close_matches(flag.name, known, n=1, cutoff=NEARLY)
            yield flag, near[0] if near else ""


def unknown_to_engine(launch: Launch, known: Mapping[str, str], engine: Path, version: str) -> Iterator[str]:
    """Yields a note for each flag that this machine's SGLang lacks. The cluster's may have it.

    Args:
        known: what ``known_flags`` returned, because some of the host's flags have SGLang's prefix.
        engine: folder sglang/srt.
    """
    trees = [_parsed(file) for pattern in SGLANG for file in engine.glob(pattern)]
    names = {name.replace("--", ENGINE, 1) for tree in trees for name in _names(tree)} | known.keys()
    for flag in (flag for flag in dict.fromkeys(launch.flags) if flag.name.startswith(ENGINE)):
        meant = [name for name in names if name.startswith(flag.name)]  # argparse accepts shortened names
        if flag.name not in names and len(meant) != 1:
            near = did_you_mean(flag.name, sorted(names)) or "."
            yield (
                f"{flag.where}: {flag.name}: not known to SGLang {version} on this machine{near} If the "
                "cluster's SGLang does not know it either, slime drops it and miles refuses it"
            )


def mistakes(
    launch: Launch, known: Mapping[str, str], paths: Sequence[Path], *, is_own_host: bool
) -> Iterator[str]:
    """Yields a line for each mistake.

    Args:
        known: what ``known_flags`` returned.
        paths: where Python looks for modules in the run.
        is_own_host: whether the script belongs to this host, so that a flag that the host lacks is a mistake.
    """
    if launch.lacks("--hf-checkpoint"):
        script, count = Path(launch.script).name, len(launch.flags)
        yield f"{script}: --hf-checkpoint: expected in the launch, got none among its {count} flags: add it"
    yield from _unknown(launch, known, is_own_host=is_own_host)
    yield from _values(launch, dict(known) | NEEDED)
    yield from _arithmetic(launch, sizes_of(launch))
    yield from refusals(launch)
    yield from _tokenizer(launch)
    yield from _of_a_shell(launch)
    paths_of_flags = (flag for flag in launch.flags if flag.name.endswith("-path") and flag.values)
    functions = (flag for flag in paths_of_flags if not flag.name.startswith(ELSEWHERE))
    yield from filter(None, (_function(flag, paths) for flag in functions))


def _unknown(launch: Launch, known: Mapping[str, str], *, is_own_host: bool) -> Iterator[str]:
    for flag, near in unknown_flags(launch.flags, known):
        if near:
            hint = "" if is_own_host else " Or name the host of the script with --host"
            yield f"{flag.where}: {flag.name}: the host has no such flag; did you mean {near}?{hint}"
        elif is_own_host:
            yield f"{flag.where}: {flag.name}: the host has no such flag: remove it"


def _values(launch: Launch, kinds: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each value that the host's parser refuses, or drops in silence."""
    for flag in launch.flags:
        if flag.name in launch.unknown or any(isinstance(word, Unread) for word in flag.values):
            continue
        if wrong := _wrong(flag, kinds.get(flag.name, "")):
            yield f"{flag.where}: {flag.name}: expected {wrong}"


def _wrong(flag: WrittenFlag, kind: str) -> str:
    """Says what a flag's words should be, and what they are. Returns "" if they are right."""
    text, more = " ".join(flag.values), flag.values[1:]
    if more and (short := next((word for word in flag.values if SHORT.fullmatch(word)), None)):
        return f"flags with two dashes after it, got {short}: write --{short[1:]}"
    if kind == SWITCH:
        return f"no value, got '{text}': remove the value" if text else ""
    if kind in WANTED and not (text if kind == "file" else flag.values):
        return f"{WANTED[kind]}, got none"
    if kind in ("int", "float") and (wrong := _no_number(flag, kind)):
        return f"{wrong}, got '{flag.values[0]}'"
    if kind in WANTED and kind != "words" and more:
        return f"one value, got '{text}': remove '{' '.join(more)}'"
    return ""


def _no_number(flag: WrittenFlag, kind: str) -> str | None:
    """Says what number a flag's value should be. Returns None if the value is right."""
    try:
        number = float(flag.values[0]) if kind == "float" else int(flag.values[0])
    except ValueError:
        return WANTED[kind]
    return "at least 1" if flag.name in NEEDED and number < 1 else None


def _of_a_shell(launch: Launch) -> Iterator[str]:
    for flag in kept(launch):
        for word in flag.values:
            if isinstance(word, Unread):
                yield (
                    f"{flag.where}: {flag.name}: expected a value that the script sets, got '{word}': "
                    "pass a variable of your shell with --env NAME"
                )
    unread = {flag.name for flag in launch.flags if any(isinstance(word, Unread) for word in flag.values)}
    reasons: dict[str, list[str]] = {}
    for name in (name for name in launch.unknown if group_of(name) is None and name not in unread):
        reasons.setdefault(launch.unknown[name], []).append(name)
    if launch.others:
        reasons[launch.others] = ["any flag"]
    for why, names in reasons.items():
        yield f"{why}: {', '.join(names)} can depend on it; the rehearsal needs it: set it in the script"


def _arithmetic(launch: Launch, sizes: Sizes) -> Iterator[str]:
    if not all(map(launch.is_known, SIZES)):
        return
    where = flag.where if (flag := launch.flag("--global-batch-size")) else Path(launch.script).name
    total = sizes.prompts * sizes.samples
    if total % max(sizes.batch, 1):
        yield (
            f"{where}: --global-batch-size: expected a divisor of --rollout-batch-size x "
            f"--n-samples-per-prompt = {sizes.prompts} x {sizes.samples} = {total}, got {sizes.batch}: "
            f"{total % sizes.batch} samples of each rollout would not be trained on"
        )


def _tokenizer(launch: Launch) -> Iterator[str]:
    flag, model = launch.flag("--apply-chat-template"), launch.flag("--hf-checkpoint")
    if not (model and launch.value(model.name)):
        return
    folder = Path(launch.value(model.name))
    if fault := tokenizer_fault(folder):
        yield f"{model.where}: {model.name}: expected a tokenizer in {folder}, got {fault}"
    elif flag and tokenizer_files(folder) and not has_chat_template(folder):
        yield (
            f"{flag.where}: --apply-chat-template: expected a tokenizer with a chat template, got none in "
            f"{folder}: remove the flag, or give the chat model's folder"
        )


def _function(flag: WrittenFlag, paths: Sequence[Path]) -> str | None:
    """Says what is wrong with a flag's module.function, if its file shows it; otherwise None."""
    path = flag.values[0]
    if "." not in path or "/" in path or path.endswith(MAPPING) or isinstance(path, Unread):
        return None
    expected = f"{flag.where}: {flag.name}: expected module.function that Python finds, got '{path}'"
    if not is_here(path, paths):
        module = path.rpartition(".")[0]
        return (
            f"{expected}: no module {module} below the launch's PYTHONPATH, the script's folder or the "
            "host's folder: add its folder to PYTHONPATH"
        )
    fault = fault_of(path, paths)
    return f"{expected}: {fault}" if fault else None

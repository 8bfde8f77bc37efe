"""The parser: command line over --config file, then --custom-config-path over both, as slime merges it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.launcher.arguments import elsewhere, model, rollout, running, training
from slime_ext.launcher.arguments.flags import Flag, integer, number
from slime_ext.mappings import located, read_yaml

GROUPS: dict[str, tuple[Flag, ...]] = {
    "model": model.MODEL,
    "parallelism": model.PARALLEL,
    "precision": model.PRECISION,
    "data": rollout.DATA,
    "sampling": rollout.SAMPLING,
    "reward": rollout.REWARD,
    "evaluation": rollout.EVAL,
    "steps": training.STEPS,
    "loss": training.LOSS,
    "correction": training.CORRECTION,
    "optimizer": training.OPTIMIZER,
    "engine": running.ENGINE,
    "output": running.OUTPUT,
}
FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS.values() for flag in group)
READ = ("hf_checkpoint", "prompt_data", "custom_config_path", "load")  # files and folders that a run reads
BY_NAME = {flag.name.lstrip("-").replace("-", "_"): flag for flag in FLAGS}
BY_DEST = {flag.dest: flag for flag in FLAGS}
KNOWN_NAMES = [flag.name for flag in FLAGS] + ["--config"]


class OneLineParser(argparse.ArgumentParser):
    """argparse that raises ConfigError instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        where, _, what = message.removeprefix("argument ").partition(": ")
        raise ConfigError(f"{where}: {what}" if what else message)


def build_parser() -> argparse.ArgumentParser:
    """Every flag, in groups, for parsing and for ``--help``."""
    parser = OneLineParser(
        prog="slime-ext train",
        usage="slime-ext train [--config FILE] [FLAG ...]",
        allow_abbrev=False,
        description="Train with Megatron on rollouts of SGLang.",
        epilog="Flags of slime or Megatron that change nothing here are accepted and named at start.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line wins; ours")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            flag.add_to(group)
    for bare in sorted(elsewhere.NO_EFFECT | set(elsewhere.FIXED)):
        dest = f"elsewhere:{bare}"
        parser.add_argument(
            f"--{bare}", dest=dest, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Command line and files to a namespace with one attribute per flag, plus notes and slime_ext.

    Raises:
        ConfigError: an unknown flag or key, a value of the wrong type, a file that cannot be read.
    """
    parser = build_parser()
    first = _known(parser, argv)
    args = _known(parser, config_tokens(first.config) + argv) if first.config else first
    args.notes = elsewhere.note_no_effect(_take_elsewhere(args))
    args.slime_ext = None
    if args.custom_config_path:
        merge_custom_config(args)
    for flag in FLAGS:
        if flag.required and getattr(args, flag.dest) is None:
            raise ConfigError(f"{flag.name}: expected a value, got nothing: {flag.help.split(';')[0]}")
    return args


def _known(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    args, rest = parser.parse_known_args(argv)
    if rest:
        elsewhere.reject_unknown(next((t for t in rest if t.startswith("--")), rest[0]), KNOWN_NAMES)
    return args


def _take_elsewhere(args: argparse.Namespace) -> list[str]:
    """Removes what `elsewhere` accepted from `args`, checks fixed values, returns flags without effect."""
    silent = []
    for key in [key for key in vars(args) if key.startswith("elsewhere:")]:
        bare, values = key.removeprefix("elsewhere:"), vars(args).pop(key)
        if bare in elsewhere.FIXED:
            elsewhere.check_fixed(bare, values)
        else:
            silent.append(f"--{bare}")
    return silent


def read_mapping(path: str, flag: str) -> dict[str, Any]:
    """The mapping in a YAML file; `flag` is named in errors. What --config reads is relative to its file."""
    data = read_yaml(path, f"{flag} {path}")
    if not isinstance(data, dict | None):
        raise ConfigError(f"{flag} {path}: expected a mapping of keys to values, got a {type(data).__name__}")
    read = (data or {}).items()
    return (
        dict(data or {}) if flag != "--config" else {key: _located(key, value, path) for key, value in read}
    )


def _located(key: Any, value: Any, file: str) -> Any:
    """The value of a key that names what is read, from the folder of its file."""
    name = str(key).lstrip("-").replace("-", "_")
    if name == "eval_prompt_data" and isinstance(value, list):
        return [located(v, file) if i % 2 and isinstance(v, str) else v for i, v in enumerate(value)]
    return located(value, file) if name in READ and isinstance(value, str) and value else value


def config_tokens(path: str) -> list[str]:
    """A --config file as the command line that says the same."""
    tokens: list[str] = []
    for key, value in read_mapping(path, "--config").items():
        tokens += _tokens(f"--config {path}: {key}", str(key).lstrip("-").replace("-", "_"), value)
    return tokens


def _tokens(where: str, key: str, value: Any) -> list[str]:
    flag = BY_DEST.get(key) if key in BY_DEST else BY_NAME.get(key)
    if flag is None:
        return _elsewhere_tokens(where, key, value)
    if flag.is_switch:
        return _switch_tokens(where, flag, value, by_dest=key == flag.dest)
    if flag.nargs and isinstance(value, list):
        return [flag.name, *map(str, value)]
    if value is None:
        return []
    if isinstance(value, bool | list | dict):
        raise ConfigError(f"{where}: expected one value, got {value!r}")
    return [flag.name, str(value)] if flag.nargs else [f"{flag.name}={value}"]


def _switch_tokens(where: str, flag: Flag, value: Any, by_dest: bool) -> list[str]:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: expected true or false, got {value!r}")
    wanted = not value if flag.clears and by_dest else value
    return [flag.name] if wanted else []


def _elsewhere_tokens(where: str, key: str, value: Any) -> list[str]:
    bare = key.replace("_", "-")
    if bare in elsewhere.NO_EFFECT or bare in elsewhere.FIXED:
        return [] if value is False else [f"--{bare}"] + ([] if value is True else [str(value)])
    if bare in elsewhere.REFUSED:
        raise ConfigError(f"{where}: expected a flag that this launcher implements, got one that it does not")
    near = did_you_mean(key, [*BY_DEST, *BY_NAME])
    raise ConfigError(f"{where}: expected the name of a flag, got an unknown key{near}")


def merge_custom_config(args: argparse.Namespace) -> None:
    """Sets every key of the file on `args`, over the flags, as slime does; stricter: a key must be known.

    slime sets any key unchecked. Here a top-level key is a flag's name or ``slime_ext``, and its value has
    the flag's type as YAML reads it, so that a file that is accepted here means the same in slime.

    Raises:
        ConfigError: an unknown key, a wrong type.
    """
    path = args.custom_config_path
    for key, value in read_mapping(path, "--custom-config-path").items():
        where = f"--custom-config-path {path}: {key}"
        if key == "slime_ext":
            args.slime_ext = value
        else:
            setattr(args, key, _checked(where, _custom_flag(where, str(key)), value))


def _custom_flag(where: str, key: str) -> Flag:
    if key in BY_DEST:
        return BY_DEST[key]
    if key.replace("_", "-") in elsewhere.REFUSED:
        raise ConfigError(f"{where}: expected a key that this launcher implements, got one that it does not")
    near = did_you_mean(key, [*BY_DEST, "slime_ext"])
    hint = near or ": settings of the correction belong under the key slime_ext"
    raise ConfigError(f"{where}: expected the name of an argument or slime_ext, got an unknown key{hint}")


def _checked(where: str, flag: Flag, value: Any) -> Any:
    """`value` if YAML gave it the flag's type."""
    if value is None and flag.default is None and not flag.is_switch:
        return None
    wanted, fits = _yaml_type(flag)
    values = value if flag.nargs and isinstance(value, list) else [value]
    if not all(fits(v) for v in values):
        raise ConfigError(f"{where}: expected {wanted}, got {value!r}{_hint(flag, value)}")
    _check_choices(where, getattr(flag.convert, "choices", None), values)
    values = [float(v) for v in values] if flag.convert is number else values
    return values if flag.nargs else values[0]


def _check_choices(where: str, choices: Sequence[str] | None, values: Sequence[Any]) -> None:
    for value in values if choices else ():
        if value not in choices:
            near = did_you_mean(str(value), choices)
            raise ConfigError(f"{where}: expected one of {', '.join(choices)}, got {value!r}{near}")


def _hint(flag: Flag, value: Any) -> str:
    is_text = flag.convert is number and "e" in str(value)
    return ": write it as 1.0e-4, YAML reads 1e-4 as text" if is_text else ""


def _yaml_type(flag: Flag) -> tuple[str, Any]:
    if flag.is_switch:
        return "true or false", lambda v: isinstance(v, bool)
    if flag.convert is integer:
        return "an integer", lambda v: isinstance(v, int) and not isinstance(v, bool)
    if flag.convert is number:
        return (
            "a finite number",
            lambda v: isinstance(v, int | float) and not isinstance(v, bool) and abs(v) <= sys.float_info.max,
        )
    return "text", lambda v: isinstance(v, str) and bool(v.strip())

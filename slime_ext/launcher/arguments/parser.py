"""The parser: command line over --config file, then --custom-config-path over both, as slime merges it."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.launcher.arguments.flags import BY_DEST, BY_NAME, FLAGS, GROUPS
from slime_ext.mappings import located, read_yaml, shipped

READ = ("hf_checkpoint", "prompt_data", "custom_config_path", "load")  # files and folders that a run reads


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
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line wins; ours")
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            flag.add_to(group)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Command line and files to a namespace with one attribute per flag, plus notes and slime_ext.

    Raises:
        ConfigError: an unknown flag or key, a value of the wrong type, a file that cannot be read.
    """
    given = _known(argv)
    values = {flag.dest: bool(flag.clears) if flag.type is bool else flag.default for flag in FLAGS}
    values |= {"config": given.pop("config", None), "notes": [], "slime_ext": None}
    if values["config"]:
        values |= read_config(values["config"])
    values |= {
        dest: BY_DEST[dest].read(word, BY_DEST[dest].name, of_words=True) for dest, word in given.items()
    }
    if values["custom_config_path"]:
        values |= read_custom_config(values["custom_config_path"])
    for flag in FLAGS:
        if flag.required and values[flag.dest] is None:
            raise ConfigError(f"{flag.name}: expected a value, got nothing: {flag.help.split(';')[0]}")
    return argparse.Namespace(**values)


def _known(argv: list[str]) -> dict[str, Any]:
    """The words behind each flag that is given, by its attribute."""
    given, rest = build_parser().parse_known_args(argv)
    if not rest:
        return vars(given)
    token = next((t for t in rest if t.startswith("--")), rest[0])
    name = token.split("=")[0]
    if not name.startswith("-"):
        raise ConfigError(f"command line: expected a flag, got '{token}': a value without a flag before it")
    near = did_you_mean(name.replace("_", "-"), [flag.name for flag in FLAGS] + ["--config"])
    hint = near or ": `slime-ext train --help` names what this launcher implements of slime and Megatron"
    raise ConfigError(f"{name}: expected a flag of this launcher, got another{hint}")


def read_mapping(path: str, flag: str) -> dict[str, Any]:
    """The mapping in a YAML file; `flag` is named in errors. What --config reads is relative to its file."""
    path = shipped(path)
    data = read_yaml(path, f"{flag} {path}")
    if not isinstance(data, dict | None):
        raise ConfigError(f"{flag} {path}: expected a mapping of keys to values, got a {type(data).__name__}")
    return {
        key: _located(key, value, path) if flag == "--config" else value
        for key, value in (data or {}).items()
    }


def _located(key: Any, value: Any, file: str) -> Any:
    """The value of a key that names what is read, from the folder of its file."""
    name = _identifier(key)
    if name == "eval_prompt_data" and isinstance(value, list):
        return [located(v, file) if i % 2 and isinstance(v, str) else v for i, v in enumerate(value)]
    return located(value, file) if name in READ and isinstance(value, str) and value else value


def _identifier(key: Any) -> str:
    return str(key).lstrip("-").replace("-", "_")


def read_config(path: str) -> dict[str, Any]:
    """Attribute to value, of a file whose keys are flags or attributes and whose numbers may be text (1e-4).

    Raises:
        ConfigError: an unknown key, a wrong type.
    """
    values = {}
    for key, value in read_mapping(path, "--config").items():
        name, where = _identifier(key), f"--config {path}: {key}"
        flag = BY_DEST.get(name) or BY_NAME.get(name)
        if flag is None:
            near = did_you_mean(name, [*BY_DEST, *BY_NAME])
            raise ConfigError(f"{where}: expected a flag of this launcher, got another{near}")
        found = flag.read(value, where, of_words=True)
        values[flag.dest] = not found if flag.clears and name != flag.dest else found
    return values


def read_custom_config(path: str) -> dict[str, Any]:
    """Attribute to value, of a file that goes over all flags, as in slime; stricter: a key must be known.

    slime sets any key unchecked. Here a key is an attribute's name or ``slime_ext``, and its value has the
    flag's type as YAML reads it, so that a file that is accepted here means the same in slime.

    Raises:
        ConfigError: an unknown key, a wrong type.
    """
    values = read_mapping(path, "--custom-config-path")
    for key in [key for key in values if key != "slime_ext"]:
        where = f"--custom-config-path {path}: {key}"
        if key not in BY_DEST:
            hint = did_you_mean(str(key), [*BY_DEST, "slime_ext"])
            hint = hint or ": settings of the correction belong under the key slime_ext"
            raise ConfigError(
                f"{where}: expected an argument of this launcher or slime_ext, got another{hint}"
            )
        values[key] = BY_DEST[key].read(values[key], where)
    return values

"""``slime-ext convert --from SYSTEM FILE``: another system's block as a file for --custom-config-path."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from slime_ext import dialects
from slime_ext.commands import light
from slime_ext.commands.arguments import read_mapping
from slime_ext.commands.output import yaml_of
from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.host import contract
from slime_ext.host.flags import NEARLY

# Where a system's whole configuration holds its block, and which mappings hold it among other keys.
HOMES = {"verl": (("algorithm", "rollout_correction"), ("rollout_correction",))}
AMONG = {"verl": (("algorithm",),), "skyrl": (("trainer", "algorithm"), ("algorithm",))}
NAMED = {"verl": "rollout_correction", "skyrl": "off_policy_correction"}  # the block in those mappings
ABSENT = object()


def main(argv: list[str]) -> int:
    """Prints native YAML, with a comment wherever the meaning could surprise."""
    parser = argparse.ArgumentParser(
        prog="slime-ext convert", description="Prints another system's correction in native keys."
    )
    parser.add_argument(
        "--from", dest="system", required=True, metavar="SYSTEM", help=", ".join(dialects.DIALECTS)
    )
    parser.add_argument("file", help="YAML: the block alone, or the configuration that holds it")
    args = parser.parse_args(argv)
    print(convert(args.system, read_mapping(args.file)))
    return 0


def convert(system: str, whole: Mapping[str, Any]) -> str:
    """A block, or a configuration that holds it, as the text of a native file.

    Raises:
        ConfigError: as ``dialects.read``.
    """
    where, block = _block(system, whole)
    reading = dialects.read(system, block, "convert")
    with light.config() as config:
        loaded = config.read_config(reading.mapping)  # what is printed must load
        plan = loaded.correction.needs_plan
    notes = [
        line
        for note in reading.notes
        for line in textwrap.wrap(
            note, 100, initial_indent="# note: ", subsequent_indent="#   ", break_on_hyphens=False
        )
    ]
    flags = [f"# needs: --{key.replace('_', '-')} {value!r}" for key, value in reading.args.items()]
    use = reading.mapping.get("steps", ()) or reading.mapping.get("numerator") == "target"
    switches = {"use_tis": True} if use else {"use_tis": False, "get_mismatch_metrics": True}
    if plan:
        switches |= {"get_mismatch_metrics": True, "rollout_data_postprocess_path": contract.PLAN}
    paths = {
        "custom_tis_function_path": f"{contract.TIS}.correct",
        "custom_megatron_init_path": contract.OURS["custom_megatron_init_path"],
    }
    native = {**switches, **paths, "slime_ext": reading.mapping}
    return "\n".join([f"# converted from {system}{where and f': {where}'}", *notes, *flags, yaml_of(native)])


def _block(system: str, whole: Mapping[str, Any]) -> tuple[str, Any]:
    """The key that leads to a system's block, and the block; no key where the file is the block.

    Raises:
        ConfigError: there is none, or a key beside it that would not be read.
    """
    for path in (*AMONG.get(system, ()), ()):
        if isinstance(found := _at(whole, path, None), Mapping):
            where = ".".join(("convert", *path))
            _forbid_both(system, where, found)
            _forbid_misspelt(system, where, found if path else {})
    if (found := _find(system, whole)) is not None:
        return found
    keys = _keys(system)
    if whole and not any(key in keys or did_you_mean(str(key), keys) for key in whole):
        raise ConfigError(f"convert.{system}: expected {_home(system)}, got none{_other(system, whole)}")
    return "", whole


def _find(system: str, whole: Mapping[str, Any]) -> tuple[str, Any] | None:
    for path in (("slime_ext", system), (system,), *HOMES.get(system, ())):
        if (found := _at(whole, path, ABSENT)) is not ABSENT:
            return ".".join(path), {} if found is None else found  # null corrects nothing
    for path in AMONG.get(system, ()):
        found = _at(whole, path, {})
        if isinstance(found, Mapping) and (own := {k: v for k, v in found.items() if k in _keys(system)}):
            return ".".join(path), own
    return None


def _forbid_both(system: str, where: str, found: Mapping[str, Any]) -> None:
    """Flat keys beside the block that replaced them, of which a system reads one."""
    flat = [key for key in found if key in _keys(system)]
    if system in HOMES and NAMED[system] in found and flat:
        raise ConfigError(
            f"{where}.{flat[0]}: expected it without {NAMED[system]} beside it, got both: {system} reads one "
            "of them"
        )


def _forbid_misspelt(system: str, where: str, found: Mapping[str, Any]) -> None:
    keys = [*_keys(system), *filter(None, [NAMED.get(system)])]
    for key in (str(key) for key in found if key not in keys):
        if near := difflib.get_close_matches(key, keys, n=1, cutoff=NEARLY):
            raise ConfigError(f"{where}: expected {near[0]}, got {key}: {system} does not know it")


def _keys(system: str) -> Sequence[str]:
    return dialects.DIALECTS[system][0] if system in dialects.DIALECTS else ()


def _home(system: str) -> str:
    """What a file that holds a system's block looks like."""
    where = ".".join((*AMONG.get(system, ((),))[0], *filter(None, [NAMED.get(system)])))
    return where or f"the keys of {system} ({', '.join(_keys(system))})"


def _other(system: str, whole: Mapping[str, Any]) -> str:
    """Which other system's file it is."""
    others = (name for name in dialects.DIALECTS if name != system)
    found = (name for name in others if _find(name, whole) or any(key in _keys(name) for key in whole))
    return next((f": it is a block of {name}; use --from {name}" for name in found), "")


def _at(whole: Any, path: tuple[str, ...], absent: Any) -> Any:
    for key in path:
        if not isinstance(whole, Mapping) or key not in whole:
            return absent
        whole = whole[key]
    return whole

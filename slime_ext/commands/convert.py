"""``slime-ext convert --from SYSTEM FILE``: another system's block as a file for --custom-config-path."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import Any

from slime_ext import dialects
from slime_ext.commands import light
from slime_ext.commands.arguments import read_mapping
from slime_ext.commands.output import yaml_of
from slime_ext.host import contract

# Where a system's whole configuration holds its block, and which mappings hold it among other keys.
HOMES = {"verl": (("algorithm", "rollout_correction"), ("rollout_correction",))}
AMONG = {"verl": (("algorithm",),), "skyrl": (("trainer", "algorithm"), ("algorithm",))}
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
    reading = dialects.read(system, _block(system, whole), "convert")
    with light.config() as config:
        loaded = config.read_config(reading.mapping)  # what is printed must load
        plan = loaded.correction.needs_plan
    notes = [
        line
        for note in reading.notes
        for line in textwrap.wrap(note, 100, initial_indent="# note: ", subsequent_indent="#   ")
    ]
    flags = [f"# needs: --{key.replace('_', '-')} {value:g}" for key, value in reading.args.items()]
    use = reading.mapping.get("steps", ()) or reading.mapping.get("numerator") == "target"
    switches = {"use_tis": True} if use else {"use_tis": False, "get_mismatch_metrics": True}
    if plan:
        switches |= {"get_mismatch_metrics": True, "rollout_data_postprocess_path": contract.PLAN}
    paths = {
        "custom_tis_function_path": f"{contract.TIS}.correct",
        "custom_megatron_init_path": contract.OURS["custom_megatron_init_path"],
    }
    native = {**switches, **paths, "slime_ext": reading.mapping}
    return "\n".join([f"# converted from {system}", *notes, *flags, yaml_of(native)])


def _block(system: str, whole: Mapping[str, Any]) -> Any:
    for path in (("slime_ext", system), (system,), *HOMES.get(system, ())):
        if (found := _at(whole, path, ABSENT)) is not ABSENT:
            return {} if found is None else found  # null corrects nothing
    keys = dialects.DIALECTS.get(system, ((), None))[0]
    for path in AMONG.get(system, ()):
        found = _at(whole, path, {})
        if isinstance(found, Mapping) and (own := {k: v for k, v in found.items() if k in keys}):
            return own
    return whole


def _at(whole: Any, path: tuple[str, ...], absent: Any) -> Any:
    for key in path:
        if not isinstance(whole, Mapping) or key not in whole:
            return absent
        whole = whole[key]
    return whole

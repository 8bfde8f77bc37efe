"""``slime-ext convert FILE``: another system's settings as a file for --custom-config-path."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slime_ext.config.files import read_mapping, text_of
from slime_ext.errors import ConfigError, check_known, cut, did_you_mean
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import NEARLY
from slime_ext.tools.commands.output import plain, yaml_of
from slime_ext.tools.convert import CONVERTED, read, skyrl
from slime_ext.tools.convert.block import forbid_interpolation
from slime_ext.tools.convert.loss_side import LOSS_SIDE, of_loss
from slime_ext.tools.wording import file_of


class Home(NamedTuple):
    """Where a system's whole configuration holds its correction, as dotted keys.

    Args:
        blocks: mappings of these keys alone.
        among: mappings with these keys among others.
        name: the block's key in the latter.
        loss: mappings with keys of its loss, some of which decide what the correction is.
    """

    blocks: tuple[str, ...] = ()
    among: tuple[str, ...] = ()
    name: str = ""
    loss: tuple[str, ...] = ()


HOMES = {
    "verl": Home(
        ("algorithm.rollout_correction", "rollout_correction"),
        ("algorithm",),
        "rollout_correction",
        ("actor_rollout_ref.actor",),
    ),
    "prime_rl": Home(("trainer.loss", "loss")),
    "roll": Home(("train_infer_correction",)),
    "skyrl": Home(among=("trainer.algorithm", "algorithm"), name="off_policy_correction"),
    "areal": Home(among=("actor",)),
    "nemo_rl": Home(among=("loss_fn", "grpo")),
    "openrlhf": Home(among=("algo.advantage",), loss=("actor",)),
}
NOWHERE = Home()
FLAT = ("slime_mis", "trl", "open_instruct", "ms_swift")  # whose correction is among all other settings
ABSENT = object()
SCRIPTS = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", ".py")
ALONE = ["_self_"]  # Hydra's list of a file that no other file completes
COMPOSED = {  # system -> how its user gets the file to convert
    "verl": "run python -m verl.trainer.main_ppo OVERRIDES --cfg job --resolve and convert what it prints",
    "skyrl": "SkyRL logs its whole configuration when a run starts; save that part as YAML and convert it",
    "fireworks": "write the fields of ISConfig or TISConfig into a YAML file and convert that",
    "slime_mis": "convert the file of --custom-config-path",
    "trl": "write the script's flags as keys into a YAML file and convert that",
    "areal": "AReaL saves config.yaml in the log folder of a run; convert that",
    "nemo_rl": "run tools/config_cli.py expand FILE in NeMo-RL's checkout and convert what it prints",
    "prime_rl": "run uv run rl @ rl.toml --dry-run and convert configs/trainer.json in its output folder",
    "roll": "ROLL prints its whole configuration when a run starts; save that as YAML and convert it",
    "openrlhf": "write the script's flags as keys into a YAML file, algo: {advantage: ...}, and convert that",
    "open_instruct": "write the script's flags as keys into a YAML file and convert that",
    "ms_swift": "swift saves args.json in the output folder of a run; convert that",
}


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext convert", description="Prints another system's correction in native keys."
    )
    known = ", ".join(CONVERTED)
    whose = f"whose settings these are, where they do not tell: {known}"
    parser.add_argument("--from", dest="system", metavar="SYSTEM", help=whose)
    parser.add_argument("file", help="the block, or the composed configuration with it: YAML, JSON or TOML")
    return parser


def main(argv: list[str]) -> int:
    """Prints native YAML, with a comment wherever the meaning could surprise."""
    args = command_line().parse_args(argv)
    if args.system is not None:
        check_known("--from", "system", args.system, CONVERTED)
    settings = read_settings(args.file, args.system)
    print(plain(convert(args.system or system_of(args.file, settings), settings)))
    return 0


def system_of(path: str, settings: Mapping[str, Any]) -> str:
    """Returns the one system whose correction a file holds.

    Raises:
        ConfigError: none, or several: the same keys mean another algorithm in another system.
    """
    systems = [name for name in CONVERTED if is_of(name, settings)]
    if len(systems) == 1:
        return systems[0]
    several = f"settings that {', '.join(systems[:-1])} and {systems[-1]} know" if systems else "none"
    choices = ", ".join(systems or CONVERTED)
    raise ConfigError(
        f"{path}: expected the correction of one system, got {several}: add --from SYSTEM, one of {choices}"
    )


def read_settings(path: str, system: str | None = None) -> dict[str, Any]:
    """Reads a system's block, or its composed configuration, from a YAML, JSON or TOML file.

    Nothing is composed here: what a script's overrides or other files add is the system's own business, and a
    part of it could be another algorithm.

    Raises:
        ConfigError: the file cannot be read, is a script, or names other files that complete it.
    """
    text = text_of(path)
    how = COMPOSED.get(system or "", "add --from SYSTEM, which says how to get one")
    if Path(path).suffix in SCRIPTS or text.startswith("#!"):
        raise ConfigError(f"{path}: expected a YAML, JSON or TOML file, got a script: {how}")
    settings = read_mapping(path, text)
    if settings.pop("defaults", ALONE) != ALONE:
        expected = "expected a composed configuration, got defaults, which add other files"
        raise ConfigError(f"{path}: {expected}: {how}")
    return settings


def convert(system: str, whole: Mapping[str, Any]) -> str:
    """A block, or a configuration that holds it, as the text of a native file.

    Raises:
        ConfigError: as ``slime_ext.tools.convert.read``.
    """
    from slime_ext.config.load import read_config  # imports torch, which takes two seconds

    where, block = _block(system, whole)
    block, beside = _without_loss(system, whole, where, block)
    reading = read(system, block)
    try:  # what is printed must load
        correction = read_config(reading.mapping).correction
    except ConfigError as error:
        raise ConfigError(f"convert.{system}: expected settings that this project has, got {error}") from None
    file = file_of(reading.mapping, correction)
    kept = [key for key, value in _kept(system, whole, where, block).items() if file.get(key) != value]
    beside += [f"{', '.join(map(cut, kept))}: not of {system}, so keep them in the new file"] if kept else []
    commented = [
        textwrap.fill(f"# note: {note}", 100, subsequent_indent="#   ", break_on_hyphens=False)
        for note in (*beside, *reading.notes)
    ]
    flags = [f"# needs: {flag_of(key)} {value}" for key, value in reading.args.items()]
    origin = f"# converted from {system}{where and f': {where}'}"
    return "\n".join([origin, *commented, *flags, yaml_of(file)])


def _kept(system: str, whole: Mapping[str, Any], where: str, block: Any) -> dict[str, Any]:
    """What a file of slime's own has beside the system's block."""
    if where == f"slime_ext.{system}":
        beside = {**whole, **whole["slime_ext"]}
        return {key: value for key, value in beside.items() if key not in ("slime_ext", system)}
    is_whole = system == "slime_mis" and not where
    return {key: value for key, value in whole.items() if key not in block} if is_whole else {}


def _without_loss(system: str, whole: Mapping[str, Any], where: str, block: Any) -> tuple[Any, list[str]]:
    """The block without keys of the system's loss, and a note for each of them, in it or beside it."""
    keys, parent = _keys(system), where.rpartition(".")[0]
    beside = [_at(whole, place) for place in dict.fromkeys((where, parent, *HOMES.get(system, NOWHERE).loss))]
    found = {
        key: value
        for mapping in (*beside, block)
        for key, value in (mapping.items() if isinstance(mapping, Mapping) else ())
        if key in LOSS_SIDE and key not in keys and value not in (None, False)  # off, as slime's own
    }
    if isinstance(block, Mapping):
        block = {key: value for key, value in block.items() if key not in found}
    return block, [of_loss(system, key, value) for key, value in found.items()]


def _block(system: str, whole: Mapping[str, Any]) -> tuple[str, Any]:
    """The key that leads to a system's block, and the block; no key where the file is the block.

    Raises:
        ConfigError: there is none, or a key beside it that would not be read.
    """
    _forbid_interpolated_places(system, whole)
    for place in (*HOMES.get(system, NOWHERE).among, ""):
        if isinstance(found := _at(whole, place), Mapping):
            _check_beside(system, place, found)
    if (home := _find(system, whole)) is not None:
        where, block = home
        if isinstance(block, Mapping):
            for mapping in (_at(whole, place) for place in HOMES.get(system, NOWHERE).loss):
                block = {**_known(system, mapping), **block}
        return where, block
    keys = _keys(system)
    unknown = [key for key in whole if key not in keys]
    other = _other(system, whole) if unknown else ""
    if other or (unknown and not any(key in keys or did_you_mean(str(key), keys) for key in whole)):
        raise ConfigError(f"convert.{system}: expected {_home(system)}, got none{other}")
    if system in FLAT:
        known = keys if system == "slime_mis" else (*keys, *LOSS_SIDE)
        whole = {k: value for k, value in whole.items() if k in known or _nearly(str(k), keys)}
    return "", whole


def _find(system: str, whole: Mapping[str, Any]) -> tuple[str, Any] | None:
    home = HOMES.get(system, NOWHERE)
    for place in (f"slime_ext.{system}", system, *home.blocks):
        if (found := _at(whole, place)) is not ABSENT:
            return place, {} if found is None else found  # null corrects nothing
    own = {}
    for place in home.among:
        found = _at(whole, place)
        own |= _known(system, found)
    loss_alone = system == "skyrl" and not own.keys() - set(skyrl.LOSS) and own.get(skyrl.LOSS[0]) is None
    return (home.among[0], own) if own and not loss_alone else None


def _known(system: str, mapping: Any) -> dict[str, Any]:
    """The keys of a mapping that a system's block may have."""
    return {k: v for k, v in mapping.items() if k in _keys(system)} if isinstance(mapping, Mapping) else {}


def _check_beside(system: str, place: str, found: Mapping[str, Any]) -> None:
    """Refuses flat keys beside the block that replaced them, of which verl reads one, and misspelt ones."""
    where, named, keys = f"convert.{place}".rstrip("."), HOMES.get(system, NOWHERE).name, _keys(system)
    flat = [key for key in found if key in keys]
    if system == "verl" and named in found and flat:
        raise ConfigError(
            f"{where}.{flat[0]}: expected it without {named} beside it, got both: {system} reads one of them"
        )
    known = [*keys, *filter(None, [named])]
    for key in (str(key) for key in found if key not in known and place):
        if near := _nearly(key, known):
            raise ConfigError(f"{where}: expected {near[0]}, got {cut(key)}: {system} does not know it")


def _nearly(key: str, known: Sequence[str]) -> list[str]:
    """The known key that a key is a misspelling of, if there is one."""
    return difflib.get_close_matches(key, known, n=1, cutoff=NEARLY)


def _keys(system: str) -> Sequence[str]:
    return CONVERTED[system][0]


def _home(system: str) -> str:
    """What a file that holds a system's block looks like."""
    home = HOMES.get(system, NOWHERE)
    if home.blocks or home.among:
        return home.blocks[0] if home.blocks else ".".join(filter(None, [home.among[0], home.name]))
    return f"the keys of {system} ({', '.join(_keys(system))})"


def _other(system: str, whole: Mapping[str, Any]) -> str:
    """Which other system's file it is."""
    found = (name for name in CONVERTED if name != system and is_of(name, whole))
    return next((f": it is a block of {name}; use --from {name}" for name in found), "")


def is_of(system: str, whole: Mapping[str, Any]) -> bool:
    """Whether a file holds a system's block at its place, is that block, or has keys that it alone has."""
    if (home := _find(system, whole)) is not None:
        return not home[1] or any(key not in LOSS_SIDE for key in home[1])
    if system in FLAT:
        others = [key for name in CONVERTED if name != system for key in _keys(name)]
        return any(key in _keys(system) and key not in others for key in whole)
    return all(key in _keys(system) for key in whole) and any(key not in LOSS_SIDE for key in whole)


def _at(whole: Any, place: str) -> Any:
    for key in filter(None, place.split(".")):
        if not isinstance(whole, Mapping) or key not in whole:
            return ABSENT
        whole = whole[key]
    return whole


def _forbid_interpolated_places(system: str, whole: Mapping[str, Any]) -> None:
    """Refuses an interpolation in place of a mapping that may hold the system's correction."""
    home = HOMES.get(system, NOWHERE)
    for names in (place.split(".") for place in (*home.blocks, *home.among, *home.loss)):
        for place in (".".join(names[: i + 1]) for i in range(len(names))):
            forbid_interpolation(f"convert.{place}", _at(whole, place))

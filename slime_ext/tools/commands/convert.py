"""``slime-ext convert --from SYSTEM FILE``: another system's settings as a file for --custom-config-path."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from slime_ext.config import dialects
from slime_ext.config import load as config
from slime_ext.config.dialects import skyrl
from slime_ext.errors import ConfigError, check_known, cut, did_you_mean
from slime_ext.host.contract import flag_of
from slime_ext.host.flags import NEARLY
from slime_ext.tools.commands.output import plain, yaml_of
from slime_ext.tools.scripts import hydra
from slime_ext.tools.scripts.read import is_script
from slime_ext.tools.wording import file_of

# Where a system's whole configuration holds its block, and which mappings hold its keys among others.
HOMES = {
    "verl": (("algorithm", "rollout_correction"), ("rollout_correction",)),
    "prime_rl": (("trainer", "loss"), ("loss",)),
    "roll": (("train_infer_correction",),),
}
AMONG = {
    "verl": (("algorithm",),),
    "skyrl": (("trainer", "algorithm"), ("algorithm",)),
    "areal": (("actor",),),
    "nemo_rl": (("loss_fn",), ("grpo",)),
    "openrlhf": (("algo", "advantage"),),
}
LOSSES_AT = {
    "verl": ("actor_rollout_ref", "actor"),
    "openrlhf": ("actor",),
}  # where the keys of its loss stand
NAMED = {"verl": "rollout_correction", "skyrl": "off_policy_correction"}  # the block in those mappings
ABSENT = object()
LOSSES = {"cispo": "cispo", "dppo": "dppo_tv"}  # SkyRL's losses with weights of their own -> our preset


def main(argv: list[str]) -> int:
    """Prints native YAML, with a comment wherever the meaning could surprise."""
    parser = argparse.ArgumentParser(
        prog="slime-ext convert", description="Prints another system's correction in native keys."
    )
    parser.add_argument(
        "--from", dest="system", required=True, metavar="SYSTEM", help=", ".join(dialects.CONVERTED)
    )
    parser.add_argument(
        "file",
        help="YAML (with Hydra's defaults): the block alone, or the configuration that holds it; TOML; or a "
        "launch script with Hydra's overrides",
    )
    args = parser.parse_args(argv)
    check_known("--from", "system", args.system, dialects.CONVERTED)
    print(plain(convert(args.system, read_settings(args.system, args.file))))
    return 0


def read_settings(system: str, path: str) -> dict[str, Any]:
    """The settings of a file that concern a system's correction.

    Raises:
        ConfigError: it cannot be read, or is a script that sets nothing of it.
    """
    places = (*_places(system), *filter(None, [LOSSES_AT.get(system)]))
    wanted = tuple(place[0] for place in places)
    if not is_script(path):
        return hydra.with_defaults(path, wanted)
    below = tuple(f"{'.'.join(place)}." for place in places)
    found = hydra.settings_of_script(path, below, _keys(system), wanted)
    if _find(system, found) is None:
        other = system_of(path)
        is_of = (
            f"it is a script of {other}; use --from {other}"
            if other
            else f"{system} corrects nothing without"
        )
        raise ConfigError(f"{path}: expected overrides of {_home(system)}, got none: {is_of}")
    return found


def system_of(path: str) -> str | None:
    """The system whose correction a launch script sets by Hydra's overrides."""
    names = dict.fromkeys((*HOMES, *AMONG))
    return next((name for name in names if _find(name, _overrides(name, path))), None)


def _overrides(system: str, path: str) -> dict[str, Any]:
    return hydra.overrides(path, _below(system), _keys(system))


def _below(system: str) -> tuple[str, ...]:
    return tuple(f"{'.'.join(place)}." for place in _places(system))


def _places(system: str) -> tuple[tuple[str, ...], ...]:
    return (*HOMES.get(system, ()), *AMONG.get(system, ()))


def convert(system: str, whole: Mapping[str, Any]) -> str:
    """A block, or a configuration that holds it, as the text of a native file.

    Raises:
        ConfigError: as ``dialects.read``.
    """
    where, block, notes = _block(system, whole)
    block, of_loss = _without_loss(system, whole, where, block)
    notes = (*notes, *of_loss)
    reading = dialects.read(system, block, "convert")
    correction = config.read_config(reading.mapping).correction  # what is printed must load
    commented = [
        textwrap.fill(f"# note: {note}", 100, subsequent_indent="#   ", break_on_hyphens=False)
        for note in (*notes, *reading.notes)
    ]
    flags = [f"# needs: {flag_of(key)} {value!r}" for key, value in reading.args.items()]
    native = file_of(reading.mapping, correction)
    origin = f"# converted from {system}{where and f': {where}'}"
    return "\n".join([origin, *commented, *flags, yaml_of(native)])


def _without_loss(
    system: str, whole: Mapping[str, Any], where: str, block: Any
) -> tuple[Any, tuple[str, ...]]:
    """The block without keys of the system's loss, and a note for each of them, in it or beside it."""
    keys, parents = _keys(system), where.split(".")[:-1]
    beside = [_at(whole, tuple(parents)), _at(whole, LOSSES_AT.get(system, ())), block]
    found = {
        key: value
        for mapping in beside
        for key, value in (mapping.items() if isinstance(mapping, Mapping) else ())
        if key in dialects.LOSS_SIDE and key not in keys and value is not None
    }
    if isinstance(block, Mapping):
        block = {key: value for key, value in block.items() if key not in found}
    return block, tuple(
        f"{key}: {cut(value)} is of {system}'s loss, not its correction; slime has {dialects.LOSS_SIDE[key]}"
        for key, value in found.items()
    )


def _block(system: str, whole: Mapping[str, Any]) -> tuple[str, Any, tuple[str, ...]]:
    """The key that leads to a system's block, the block, and notes; no key where the file is the block.

    Raises:
        ConfigError: there is none, or a key beside it that would not be read.
    """
    for path in (*AMONG.get(system, ()), ()):
        if isinstance(found := _at(whole, path), Mapping):
            _check_beside(system, ".".join(("convert", *path)), found, is_top=not path)
    if (found := _find(system, whole)) is not None:
        return _with_loss(*found) if system == "skyrl" else (*found, ())
    keys = _keys(system)
    if whole and not any(key in keys or did_you_mean(str(key), keys) for key in whole):
        raise ConfigError(f"convert.{system}: expected {_home(system)}, got none{_other(system, whole)}")
    return "", whole, ()


def _with_loss(where: str, block: Any) -> tuple[str, Any, tuple[str, ...]]:
    """SkyRL's block; its policy_loss_type counts where that loss has weights of its own."""
    loss = block.get("policy_loss_type") if isinstance(block, Mapping) else None
    if loss is None or loss == "rollout_is":
        return where, block, ()
    note = (
        f"policy_loss_type {loss} has weights of its own, which are not converted: preset {LOSSES.get(loss)}"
    )
    kept = {key: value for key, value in block.items() if key not in skyrl.LOSS}
    return where, kept, (note,) if loss in LOSSES else ()


def _find(system: str, whole: Mapping[str, Any]) -> tuple[str, Any] | None:
    for path in (("slime_ext", system), (system,), *HOMES.get(system, ())):
        if (found := _at(whole, path)) is not ABSENT:
            return ".".join(path), {} if found is None else found  # null corrects nothing
    own = {}
    for path in AMONG.get(system, ()):
        found = _at(whole, path)
        own |= {k: v for k, v in found.items() if k in _keys(system)} if isinstance(found, Mapping) else {}
    loss_alone = system == "skyrl" and not own.keys() - set(skyrl.LOSS) and own.get(skyrl.LOSS[0]) is None
    return (".".join(AMONG[system][0]), own) if own and not loss_alone else None


def _check_beside(system: str, where: str, found: Mapping[str, Any], *, is_top: bool) -> None:
    """Refuses flat keys beside the block that replaced them, of which verl reads one, and misspelt ones."""
    named, keys = NAMED.get(system), _keys(system)
    flat = [key for key in found if key in keys]
    if system == "verl" and named in found and flat:
        raise ConfigError(
            f"{where}.{flat[0]}: expected it without {named} beside it, got both: {system} reads one of them"
        )
    known = [*keys, *([named] if named else [])]
    for key in (str(key) for key in found if key not in known and not is_top):
        if near := difflib.get_close_matches(key, known, n=1, cutoff=NEARLY):
            raise ConfigError(f"{where}: expected {near[0]}, got {cut(key)}: {system} does not know it")


def _keys(system: str) -> Sequence[str]:
    return dialects.CONVERTED[system][0]


def _home(system: str) -> str:
    """What a file that holds a system's block looks like."""
    places = _places(system)
    named = [NAMED[system]] if system in NAMED and system not in HOMES else []
    return ".".join((*places[0], *named)) if places else f"the keys of {system} ({', '.join(_keys(system))})"


def _other(system: str, whole: Mapping[str, Any]) -> str:
    """Which other system's file it is."""
    others = (name for name in dialects.CONVERTED if name != system)
    found = (name for name in others if _find(name, whole) or any(key in _keys(name) for key in whole))
    return next((f": it is a block of {name}; use --from {name}" for name in found), "")


def _at(whole: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(whole, Mapping) or key not in whole:
            return ABSENT
        whole = whole[key]
    return whole

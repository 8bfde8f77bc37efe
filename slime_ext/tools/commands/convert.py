"""``slime-ext convert --from SYSTEM FILE``: another system's settings as a file for --custom-config-path."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


class Home(NamedTuple):
    """Where a system's whole configuration holds its correction, as dotted keys.

    Args:
        blocks: mappings of these keys alone.
        among: mappings with these keys among others.
        name: the block's key in the latter.
        loss: a mapping with keys of its loss.
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
PLAIN = {"verl": "verl.trainer.main_ppo"}  # of a system with Hydra: the program whose files correct nothing
NOWHERE = Home()
FLAT = ("trl", "open_instruct", "ms_swift")  # whose correction stands among all other settings
ABSENT = object()
PPO = "regular"  # SkyRL's name of the loss that slime has too
LOSSES = {"cispo": "cispo", "dppo": "dppo_tv"}  # SkyRL's losses with weights of their own -> our preset


def main(argv: list[str]) -> int:
    """Prints native YAML, with a comment wherever the meaning could surprise."""
    parser = argparse.ArgumentParser(
        prog="slime-ext convert", description="Prints another system's correction in native keys."
    )
    known = ", ".join(dialects.CONVERTED)
    parser.add_argument("--from", dest="system", required=True, metavar="SYSTEM", help=known)
    what = "the block alone, or the configuration that holds it, as YAML or TOML; or a launch script"
    parser.add_argument("file", help=f"{what} with Hydra's overrides")
    args = parser.parse_args(argv)
    check_known("--from", "system", args.system, dialects.CONVERTED)
    print(plain(convert(args.system, read_settings(args.system, args.file))))
    return 0


def read_settings(system: str, path: str) -> dict[str, Any]:
    """The settings of a file that concern a system's correction.

    Raises:
        ConfigError: it cannot be read, or is a script that sets nothing of it.
    """
    if not is_script(path):
        return hydra.of_file(path, _places(system))
    words = hydra.words_of(path)
    found = _overridden(system, path, words)
    other = None if _find(system, found) else next(_systems(path, words), None)
    if other is None:
        found = _merged(hydra.beneath(path, words, _places(system), PLAIN.get(system, "")), found)
    if _find(system, found) is None:
        keys = _keys(system)
        for word in (word for word in words if word.startswith("--") and _last_name(word) in keys):
            raise ConfigError(
                f"{path}: expected a YAML file, got the flag {cut(word)}: write {system}'s settings into one"
            )
        is_of = f"{system} corrects nothing without"
        is_of = f"it is a script of {other}; use --from {other}" if other else is_of
        raise ConfigError(f"{path}: expected overrides of {_home(system)}, got none: {is_of}")
    return found


def _last_name(flag: str) -> str:
    """The last part of a flag's dotted name.

    >>> _last_name("--algo.advantage.is_correction_level=token")
    'is_correction_level'
    """
    return flag.removeprefix("--").partition("=")[0].rpartition(".")[2]


def _merged(beneath: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(beneath[key], over[key])
        for key in over
        if isinstance(over[key], dict) and beneath.get(key)
    }
    return {**beneath, **over, **both}


def system_of(path: str) -> str | None:
    """The system whose correction a launch script sets by Hydra's overrides."""
    return next(_systems(path, hydra.words_of(path)), None)


def _systems(path: str, words: list[str]) -> Iterator[str]:
    return (name for name in HOMES if _find(name, _overridden(name, path, words)))


def _overridden(system: str, path: str, words: list[str]) -> dict[str, Any]:
    below = tuple(f"{place}." for place in _places(system))
    return hydra.overrides(path, words, below, _keys(system))


def _places(system: str) -> tuple[str, ...]:
    home = HOMES.get(system, NOWHERE)
    return home.blocks + home.among + home.loss


def convert(system: str, whole: Mapping[str, Any]) -> str:
    """A block, or a configuration that holds it, as the text of a native file.

    Raises:
        ConfigError: as ``dialects.read``.
    """
    where, block, notes = _block(system, whole)
    block, of_loss = _without_loss(system, whole, where, block)
    reading = dialects.read(system, block, "convert")
    correction = config.read_config(reading.mapping).correction  # what is printed must load
    commented = [
        textwrap.fill(f"# note: {note}", 100, subsequent_indent="#   ", break_on_hyphens=False)
        for note in (*notes, *of_loss, *reading.notes)
    ]
    flags = [f"# needs: {flag_of(key)} {value!r}" for key, value in reading.args.items()]
    origin = f"# converted from {system}{where and f': {where}'}"
    return "\n".join([origin, *commented, *flags, yaml_of(file_of(reading.mapping, correction))])


def _without_loss(system: str, whole: Mapping[str, Any], where: str, block: Any) -> tuple[Any, list[str]]:
    """The block without keys of the system's loss, and a note for each of them, in it or beside it."""
    keys, parent = _keys(system), where.rpartition(".")[0]
    beside = [_at(whole, place) for place in dict.fromkeys((where, parent, *HOMES.get(system, NOWHERE).loss))]
    found = {
        key: value
        for mapping in (*beside, block)
        for key, value in (mapping.items() if isinstance(mapping, Mapping) else ())
        if key in dialects.LOSS_SIDE and key not in keys and value is not None
    }
    if isinstance(block, Mapping):
        block = {key: value for key, value in block.items() if key not in found}
    return block, [_of_loss(system, key, value) for key, value in found.items()]


def _of_loss(system: str, key: str, value: Any) -> str:
    ours = dialects.LOSS_SIDE[key]
    return f"{key}: {cut(value)} is of {system}'s loss, not its correction; slime has {ours}"


def _block(system: str, whole: Mapping[str, Any]) -> tuple[str, Any, tuple[str, ...]]:
    """The key that leads to a system's block, the block, and notes; no key where the file is the block.

    Raises:
        ConfigError: there is none, or a key beside it that would not be read.
    """
    for place in (*HOMES.get(system, NOWHERE).among, ""):
        if isinstance(found := _at(whole, place), Mapping):
            _check_beside(system, place, found)
    if (home := _find(system, whole)) is not None:
        return _with_loss(*home) if system == "skyrl" else (*home, ())
    keys = _keys(system)
    if whole and not any(key in keys or did_you_mean(str(key), keys) for key in whole):
        raise ConfigError(f"convert.{system}: expected {_home(system)}, got none{_other(system, whole)}")
    if system in FLAT:
        known = (*keys, *dialects.LOSS_SIDE)
        whole = {k: value for k, value in whole.items() if k in known or did_you_mean(str(k), keys)}
    return "", whole, ()


def _with_loss(where: str, block: Any) -> tuple[str, Any, tuple[str, ...]]:
    """SkyRL's block; its policy_loss_type counts where that loss has weights of its own."""
    loss = block.get("policy_loss_type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or loss == "rollout_is":
        return where, block, ()
    kept = {key: value for key, value in block.items() if key not in skyrl.LOSS}
    if loss in LOSSES:
        said = f"policy_loss_type {loss} has its own weights, which are not converted: preset {LOSSES[loss]}"
        return where, kept, (said,)
    of_loss = ((key, block.get(key)) for key in skyrl.LOSS)
    return where, kept, tuple(_of_loss("skyrl", *pair) for pair in of_loss if pair[1] not in (None, PPO))


def _find(system: str, whole: Mapping[str, Any]) -> tuple[str, Any] | None:
    home = HOMES.get(system, NOWHERE)
    for place in (f"slime_ext.{system}", system, *home.blocks):
        if (found := _at(whole, place)) is not ABSENT:
            return place, {} if found is None else found  # null corrects nothing
    own = {}
    for place in home.among:
        found = _at(whole, place)
        own |= {k: v for k, v in found.items() if k in _keys(system)} if isinstance(found, Mapping) else {}
    loss_alone = system == "skyrl" and not own.keys() - set(skyrl.LOSS) and own.get(skyrl.LOSS[0]) is None
    return (home.among[0], own) if own and not loss_alone else None


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
        if near := difflib.get_close_matches(key, known, n=1, cutoff=NEARLY):
            raise ConfigError(f"{where}: expected {near[0]}, got {cut(key)}: {system} does not know it")


def _keys(system: str) -> Sequence[str]:
    return dialects.CONVERTED[system][0]


def _home(system: str) -> str:
    """What a file that holds a system's block looks like."""
    home = HOMES.get(system, NOWHERE)
    if home.blocks or home.among:
        return home.blocks[0] if home.blocks else ".".join(filter(None, [home.among[0], home.name]))
    return f"the keys of {system} ({', '.join(_keys(system))})"


def _other(system: str, whole: Mapping[str, Any]) -> str:
    """Which other system's file it is."""
    others = (name for name in dialects.CONVERTED if name != system)
    found = (name for name in others if _find(name, whole) or any(key in _keys(name) for key in whole))
    return next((f": it is a block of {name}; use --from {name}" for name in found), "")


def _at(whole: Any, place: str) -> Any:
    for key in filter(None, place.split(".")):
        if not isinstance(whole, Mapping) or key not in whole:
            return ABSENT
        whole = whole[key]
    return whole

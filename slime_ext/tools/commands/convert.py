"""Runs ``slime-ext convert FILE``: translates another system's settings for --custom-config-path."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slime_ext.config.files import read_mapping, text_of
from slime_ext.errors import ConfigError, check_known, cut, did_you_mean
from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import NEARLY
from slime_ext.tools.commands.output import plain, yaml_of
from slime_ext.tools.convert import CONVERTED, overrides, read, skyrl
from slime_ext.tools.convert.block import forbid_interpolation
from slime_ext.tools.convert.elsewhere import ELSEWHERE, elsewhere_of, refuse
from slime_ext.tools.convert.loss_side import LOSS_SIDE, of_loss
from slime_ext.tools.wording import file_of


class Home(NamedTuple):
    """The places of a correction in a system's whole configuration, as dotted keys.

    Args:
        blocks: places of mappings that hold only the keys of the correction.
        among: places of mappings that hold other keys as well.
        name: the key of the correction's block in the mappings of ``among``.
        loss: places of mappings with keys of the loss, some of which decide what the correction is.
        stems: beginnings of names that only the correction's keys have, in any release. Foreign keys are left
            alone, but a key with such a name would correct something if the system knew it.
        instead: what the release read here has instead of the keys of earlier releases.
    """

    blocks: tuple[str, ...] = ()
    among: tuple[str, ...] = ()
    name: str = ""
    loss: tuple[str, ...] = ()
    stems: tuple[str, ...] = ()
    instead: str = ""


HOMES = {
    "verl": Home(
        ("algorithm.rollout_correction", "rollout_correction"),
        ("algorithm",),
        "rollout_correction",
        ("actor_rollout_ref.actor", "trainer"),
        # verl had the last two in its actor, before it had a block.
        ("rollout_is", "rollout_rs", "rollout_token_veto", "bypass_", "tis_imp_ratio", "behav_imp_weight"),
        "write algorithm.rollout_correction",
    ),
    "skyrl": Home(
        among=("trainer.algorithm", "algorithm"),
        name="off_policy_correction",
        stems=("off_policy_correction", "tis_", "use_tis", "token_tis", "sequence_tis", "score_centering"),
        instead="write off_policy_correction",
    ),
    "areal": Home(
        among=("actor",),
        stems=("behav_imp_weight", "behave_imp_weight", "rejection_sampling", "m2_", "use_decoupled"),
        instead="write rejection_sampling, which replaced it",
    ),
    "openrlhf": Home(
        among=("algo.advantage",),
        loss=("actor",),
        stems=("is_correction", "vllm_is_", "enable_vllm_is"),
        instead="write is_correction_level, is_correction_mode and is_correction_gating",
    ),
    "trl": Home(
        stems=("vllm_importance_sampling", "off_policy_mask"), instead="write vllm_importance_sampling_mode"
    ),
    "ms_swift": Home(
        stems=("rollout_importance_sampling", "off_policy_sequence_mask"),
        instead="write rollout_importance_sampling_mode",
    ),
}
NOWHERE = Home()
# Systems that mix the correction with all other settings.
FLAT = ("slime_mis", "trl", "ms_swift")
ABSENT = object()
NATIVE = ("preset", "steps", "numerator", "surrogate")  # native keys that say what a run corrects
SCRIPTS = (".sh", ".bash", ".zsh", ".ksh", ".slurm", ".sbatch", ".py")
ALONE = ["_self_"]  # Hydra's defaults list of a file that adds no other file
COMPOSED = {  # system -> how its user gets the file to convert
    "verl": "run python -m verl.trainer.main_ppo OVERRIDES --cfg job --resolve and convert what it prints",
    "skyrl": "SkyRL logs its whole configuration when a run starts; save that part as YAML and convert it",
    "fireworks": "write the fields of ISConfig or TISConfig into a YAML file and convert that",
    "slime_mis": "convert the file of --custom-config-path",
    "trl": "write the script's flags as keys into a YAML file and convert that",
    "areal": "AReaL saves config.yaml in the log folder of a run; convert that",
    "openrlhf": "write the script's flags as keys into a YAML file, algo: {advantage: ...}, and convert that",
    "ms_swift": "swift saves args.json in the output folder of a run; convert that",
}


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext convert",
        description="Translates another system's correction into native keys, and prints the file.",
    )
    known = ", ".join(CONVERTED)
    whose = f"the system whose settings these are; needed if the keys fit several systems: {known}"
    parser.add_argument("--from", dest="system", metavar="SYSTEM", help=whose)
    parser.add_argument("--out", metavar="FILE", help="write the file there instead of printing it")
    parser.add_argument(
        "file",
        help="the correction's block, or the whole composed configuration: YAML, JSON or TOML; a script that "
        "calls verl; or - for standard input",
    )
    return parser


def main(argv: list[str]) -> int:
    """Prints native YAML, with a comment for each meaning that could surprise."""
    args = command_line().parse_args(argv)
    known = ", ".join(CONVERTED)
    if args.system in ELSEWHERE:
        refuse("--from", args.system, known)
    if args.system is not None:
        check_known("--from", "system", args.system, CONVERTED)
    where = "standard input" if args.file == "-" else args.file
    settings, notes = read_settings(args.file, args.system)
    if name := elsewhere_of(settings):
        refuse(where, name, known)
    text = plain(convert(args.system or system_of(where, settings), settings, notes))
    if args.out is None:
        print(text)
        return 0
    try:
        Path(args.out).write_text(f"{text}\n")
    except OSError as error:
        raise ConfigError(f"--out: expected a file to write, got {args.out}: {error.strerror}") from None
    print(f"wrote {args.out}: check it with slime-ext check {args.out}")
    return 0


def system_of(path: str, settings: Mapping[str, Any]) -> str:
    """Returns the one system whose correction a file holds.

    Raises:
        ConfigError: no system fits, or several fit, and the same keys mean different algorithms in each.
    """
    systems = [name for name in CONVERTED if is_of(name, settings)]
    if len(systems) == 1:
        return systems[0]
    several = f"settings that {', '.join(systems[:-1])} and {systems[-1]} know" if systems else "none"
    choices = ", ".join(systems or CONVERTED)
    raise ConfigError(
        f"{path}: expected the correction of one system, got {several}: add --from SYSTEM, one of {choices}"
    )


def read_settings(path: str, system: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Reads a system's block, or its composed configuration, from a YAML, JSON or TOML file, and notes on it.

    Of a script only the overrides of verl's program are read. Nothing else is composed, because only the
    system itself can add other files. Without them the file could mean a different algorithm.

    Args:
        path: a file; - for standard input.

    Raises:
        ConfigError: the file cannot be read, is another script, or names other files that complete it.
    """
    where, text = ("standard input", sys.stdin.read()) if path == "-" else (path, text_of(path))
    how = COMPOSED.get(system or "", "add --from SYSTEM to see how to get such a file")
    if Path(path).suffix in SCRIPTS or text.startswith("#!"):
        if system in (None, "verl") and overrides.PROGRAM in text and not path.endswith(".py"):
            return overrides.read(where, text)
        raise ConfigError(f"{where}: expected a YAML, JSON or TOML file, got a script: {how}")
    settings = read_mapping(where, text, by_suffix=True)
    if settings.pop("defaults", ALONE) != ALONE:
        expected = "expected a composed configuration, got the key defaults, which adds other files"
        raise ConfigError(f"{where}: {expected}: {how}")
    return settings, []


def convert(system: str, whole: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Translates a block, or a configuration with it, into the text of a native file.

    Raises:
        ConfigError: as ``slime_ext.tools.convert.read``.
    """
    from slime_ext.config.load import read_config  # imports torch, which takes two seconds

    where, block = _block(system, whole)
    block, loss_notes = _without_loss(system, whole, where, block)
    reading = read(system, block)
    try:  # because the printed file must load
        correction = read_config(reading.mapping).correction
    except ConfigError as error:
        raise ConfigError(f"convert.{system}: expected settings that slime_ext has, got {error}") from None
    file = file_of(reading.mapping, correction)
    other_keys = [key for key, value in _kept(system, whole, where, block).items() if file.get(key) != value]
    if other_keys:
        outside = f"outside of {system}'s settings; copy what you need into the new file"
        loss_notes.append(f"{', '.join(map(cut, other_keys))}: {outside}")
    comments = [
        textwrap.fill(f"# note: {note}", 100, subsequent_indent="#   ", break_on_hyphens=False)
        for note in (*notes, *loss_notes, *reading.notes)
    ]
    flags = [f"# needs: {flag_of(key)} {value}" for key, value in reading.args.items()]
    origin = f"# converted from {system}{where and f': {where}'}"
    return "\n".join([origin, *comments, *flags, yaml_of(file)])


def _kept(system: str, whole: Mapping[str, Any], where: str, block: Any) -> dict[str, Any]:
    """Returns the keys of a file for slime that are outside the system's block."""
    if where == f"slime_ext.{system}":
        beside = {**whole, **whole["slime_ext"]}
        return {key: value for key, value in beside.items() if key not in ("slime_ext", system)}
    if system == "slime_mis" and not where:
        return {key: value for key, value in whole.items() if key not in block}
    native = _at(whole, "slime_ext")
    return {f"slime_ext.{key}": value for key, value in native.items()} if isinstance(native, Mapping) else {}


def _without_loss(system: str, whole: Mapping[str, Any], where: str, block: Any) -> tuple[Any, list[str]]:
    """Removes the keys of the loss from the block, and returns a note for each."""
    keys, parent = _keys(system), where.rpartition(".")[0]
    beside = [_at(whole, place) for place in dict.fromkeys((where, parent, *HOMES.get(system, NOWHERE).loss))]
    of_its_loss = {
        key: value
        for mapping in (*beside, block)
        for key, value in (mapping.items() if isinstance(mapping, Mapping) else ())
        if key in LOSS_SIDE
        and key not in keys
        and value not in (None, False)  # null and false mean off, as in slime
    }
    if isinstance(block, Mapping):
        block = {key: value for key, value in block.items() if key not in of_its_loss}
    return block, [of_loss(system, key, value) for key, value in of_its_loss.items()]


def _block(system: str, whole: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the key of a system's block, and the block.

    The key is empty if the file is the block.

    Raises:
        ConfigError: the file has no such block, or has a key beside the block that would not be read.
    """
    _forbid_interpolated_places(system, whole)
    _forbid_other_releases(system, whole)
    for place in (*HOMES.get(system, NOWHERE).among, ""):
        if isinstance(found := _at(whole, place), Mapping):
            _check_beside(system, place, found)
    if (home := _find(system, whole)) is not None:
        where, block = home
        _forbid_two(system, whole, where)
        if isinstance(block, Mapping):
            for mapping in (_at(whole, place) for place in HOMES.get(system, NOWHERE).loss):
                block = {**_known(system, mapping), **block}
        return where, block
    keys = _keys(system)
    unknown = [key for key in whole if key not in keys]
    other = _other(system, whole) if unknown else ""
    # A file with mappings is a whole configuration, whose other keys may resemble those of the correction.
    resembles = _nearly if any(isinstance(whole[key], Mapping) for key in unknown) else did_you_mean
    if other or (unknown and not any(key in keys or resembles(str(key), keys) for key in whole)):
        raise ConfigError(
            f"convert.{system}: expected {_home(system)}, got none: {other or COMPOSED[system]}"
        )
    _forbid_two(system, whole, "")
    if system in FLAT:
        known = keys if system == "slime_mis" else (*keys, *LOSS_SIDE)
        whole = {k: value for k, value in whole.items() if k in known or _nearly(str(k), keys)}
    return "", whole


def _forbid_two(system: str, whole: Mapping[str, Any], where: str) -> None:
    """Refuses a second correction of the file, which would not be read.

    Args:
        where: the place of the first, empty for the root.
    """
    home, keys = HOMES.get(system, NOWHERE), _keys(system)
    homes = [place for place in _places(system) if _at(whole, place) is not ABSENT]
    # Two such mappings hold one correction together, unless they have a key in common.
    among = [(key, f"{place}.{key}") for place in home.among for key in _corrects(system, _at(whole, place))]
    again = [place for i, (key, place) in enumerate(among) if key in dict(among[:i])]
    homes += [*(place for _, place in among[:1]), *again]
    if not where:
        homes += [key for key in whole if key in keys][:1]
    elif not where.startswith("slime_ext."):  # there the root holds slime's own flags, such as use_tis
        homes += [str(key) for key in whole if str(key).startswith(home.stems) or key == home.name]
    homes += [f"slime_ext.{key}" for key in NATIVE if _at(whole, f"slime_ext.{key}") is not ABSENT]
    homes = list(dict.fromkeys(homes))
    if len(homes) > 1:
        got = f"another at {cut(homes[1])}: remove the correction that the run does not use"
        raise ConfigError(f"convert.{cut(homes[0])}: expected one correction in a file, got {got}")


def _corrects(system: str, mapping: Any) -> list[str]:
    """Returns the keys of a mapping that say what a system corrects."""
    return [key for key in _known(system, mapping) if key not in LOSS_SIDE]


def _places(system: str) -> tuple[str, ...]:
    """Returns the places of mappings that hold only a system's correction."""
    return (f"slime_ext.{system}", system, *HOMES.get(system, NOWHERE).blocks)


def _find(system: str, whole: Mapping[str, Any]) -> tuple[str, Any] | None:
    home = HOMES.get(system, NOWHERE)
    for place in _places(system):
        if (found := _at(whole, place)) is not ABSENT:
            return place, {} if found is None else found  # null means no correction
    keys: dict[str, Any] = {}
    for place in home.among:
        keys |= _known(system, _at(whole, place))
    loss_alone = (
        system == "skyrl" and not keys.keys() - set(skyrl.LOSS) and keys.get("policy_loss_type") is None
    )
    return (home.among[0], keys) if keys and not loss_alone else None


def _known(system: str, mapping: Any) -> dict[str, Any]:
    """Returns the part of a mapping whose keys a system's block may have."""
    return {k: v for k, v in mapping.items() if k in _keys(system)} if isinstance(mapping, Mapping) else {}


def _forbid_other_releases(system: str, whole: Mapping[str, Any]) -> None:
    """Refuses keys that correct something in another release, among keys of which most are foreign."""
    home, former = HOMES.get(system, NOWHERE), CONVERTED[system].former
    known = [*_keys(system), home.name]
    for place in (*home.among, *home.loss, *([""] if system in FLAT else [])):
        mapping = _at(whole, place)
        for key in map(str, mapping if isinstance(mapping, Mapping) else ()):
            is_misspelt = not place and _nearly(key, known)
            of_another = former.get(key, "") if mapping.get(key) not in (None, False) else ""
            if not of_another and key.startswith(home.stems) and key not in known and not is_misspelt:
                of_another = home.instead
            if of_another:
                where = f"convert.{place}".rstrip(".")
                expected = f"expected a key of the release of {system} that convert reads"
                raise ConfigError(f"{where}.{cut(key)}: {expected}, got another release's: {of_another}")


def _check_beside(system: str, place: str, found: Mapping[str, Any]) -> None:
    """Refuses misspelt keys, and verl's flat keys beside the block that replaced them."""
    where, named, keys = f"convert.{place}".rstrip("."), HOMES.get(system, NOWHERE).name, _keys(system)
    flat = [key for key in found if key in keys]
    if system == "verl" and named in found and flat:
        raise ConfigError(
            f"{where}.{flat[0]}: expected it or {named}, got both: leave out the key that {system} ignores"
        )
    known = [*keys, *filter(None, [named]), *CONVERTED[system].former]
    for key in (str(key) for key in found if key not in known and place):
        if near := _nearly(key, known):
            raise ConfigError(f"{where}: expected {near[0]}, got {cut(key)}: {system} does not know it")


def _nearly(key: str, known: Sequence[str]) -> list[str]:
    """Returns a list with the known key that a misspelt key resembles. The list is empty without one."""
    return difflib.get_close_matches(key, known, n=1, cutoff=NEARLY)


def _keys(system: str) -> Sequence[str]:
    return list(CONVERTED[system].defaults)


def _home(system: str) -> str:
    """Describes where a file holds a system's block."""
    home = HOMES.get(system, NOWHERE)
    if home.blocks or home.among:
        return home.blocks[0] if home.blocks else ".".join(filter(None, [home.among[0], home.name]))
    return f"the keys of {system} ({', '.join(_keys(system))})"


def _other(system: str, whole: Mapping[str, Any]) -> str:
    """Returns a hint if the file holds another system's block."""
    found = (name for name in CONVERTED if name != system and is_of(name, whole))
    return next((f"it is a block of {name}; use --from {name}" for name in found), "")


def is_of(system: str, whole: Mapping[str, Any]) -> bool:
    """Whether a file is a system's block, or holds one.

    A file with keys of no other system counts, too.
    """
    if (home := _find(system, whole)) is not None:
        return not home[1] or any(key not in LOSS_SIDE for key in home[1])
    if system in FLAT:
        others = [key for name in CONVERTED if name != system for key in _keys(name)]
        own = (key for key in whole if key in _keys(system) and key not in others)
        return any(True for _ in own)
    return all(key in _keys(system) for key in whole) and any(key not in LOSS_SIDE for key in whole)


def _at(whole: Any, place: str) -> Any:
    for key in filter(None, place.split(".")):
        if not isinstance(whole, Mapping) or key not in whole:
            return ABSENT
        whole = whole[key]
    return whole


def _forbid_interpolated_places(system: str, whole: Mapping[str, Any]) -> None:
    """Refuses an interpolation where a mapping could hold the system's correction."""
    home = HOMES.get(system, NOWHERE)
    for names in (place.split(".") for place in (*home.blocks, *home.among, *home.loss)):
        for place in (".".join(names[: i + 1]) for i in range(len(names))):
            forbid_interpolation(f"convert.{place}", _at(whole, place))

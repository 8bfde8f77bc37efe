"""Finds a system's correction in the settings that a user has: a block alone, or a whole configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slime_ext.errors import ConfigError, cut, did_you_mean
from slime_ext.hosts.flags import NEARLY
from slime_ext.tools.convert import CONVERTED, skyrl
from slime_ext.tools.convert.block import forbid_interpolation
from slime_ext.tools.convert.loss_side import LOSS_SIDE, of_loss


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
    "rlinf": Home(among=("algorithm",), stems=("importance_sampling_fix", "importance_sampling_clip")),
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
SHARED = ("use_vllm", *LOSS_SIDE)  # keys that two systems have, of which one reads them here
ABSENT = object()
NATIVE = ("preset", "steps", "numerator", "surrogate")  # native keys that say what a run corrects
COMPOSED = {  # system -> how its user gets the file to convert
    "verl": "run python -m verl.trainer.main_ppo OVERRIDES --cfg job --resolve and convert what it prints",
    "skyrl": "SkyRL logs its whole configuration when a run starts; save that part as YAML and convert it",
    "fireworks": "write the fields of ISConfig or TISConfig into a YAML file and convert that",
    "slime_mis": "convert the file of --custom-config-path",
    "trl": "write the script's flags as keys into a YAML file and convert that",
    "areal": "AReaL saves config.yaml in the log folder of a run; convert that",
    "openrlhf": "write the script's flags as keys into a YAML file, algo: {advantage: ...}, and convert that",
    "rlinf": "RLinf prints its whole configuration when a run starts; save that as YAML and convert it",
    "ms_swift": "swift saves args.json in the output folder of a run; convert that",
}


@dataclass(frozen=True)
class Whole:
    """What a user's file holds, read as the settings of one system.

    Args:
        system: a key of ``CONVERTED``.
        values: the file's mapping.
    """

    system: str
    values: Mapping[str, Any]

    @property
    def home(self) -> Home:
        """Where the system has its correction."""
        return HOMES.get(self.system, NOWHERE)

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the system's block."""
        return list(CONVERTED[self.system].defaults)

    def at(self, place: str) -> Any:
        """Returns the value at a dotted key; ``ABSENT`` where there is none."""
        value: Any = self.values
        for key in filter(None, place.split(".")):
            if not isinstance(value, Mapping) or key not in value:
                return ABSENT
            value = value[key]
        return value

    def is_of_the_system(self) -> bool:
        """Whether the file is the system's block, or holds one.

        A file with keys of no other system counts, too.
        """
        if (located := self._find()) is not None:
            return not located[1] or any(key not in LOSS_SIDE for key in located[1])
        if self.system in FLAT:
            return any(key not in LOSS_SIDE for key in self._distinct_keys())
        return all(key in self.keys for key in self.values) and any(
            key not in LOSS_SIDE for key in self.values
        )

    def block(self) -> tuple[str, Any]:
        """Returns the place of the system's block, and the block.

        The place is empty if the file is the block.

        Raises:
            ConfigError: the file has no such block, or has a key beside the block that would not be read.
        """
        for names in (place.split(".") for place in (*self.home.blocks, *self.home.among, *self.home.loss)):
            for place in (".".join(names[: i + 1]) for i in range(len(names))):
                forbid_interpolation(place, self.at(place))
        self._forbid_other_releases()
        for place in (*self.home.among, ""):
            if isinstance(mapping := self.at(place), Mapping):
                self._check_beside(place, mapping)
        if (located := self._find()) is None:
            return "", self._root()
        where, block = located
        self._forbid_two(where)
        if isinstance(block, Mapping):
            for place in self.home.loss:
                block = {**self._known(place), **block}
        return where, block

    def without_loss(self, where: str, block: Any) -> tuple[Any, list[str]]:
        """Removes the keys of the loss from the block, and returns a note for each."""
        places = dict.fromkeys((where, where.rpartition(".")[0], *self.home.loss))
        mappings = [each for each in (*map(self.at, places), block) if isinstance(each, Mapping)]
        of_its_loss = {
            key: value
            for mapping in mappings
            for key, value in mapping.items()
            if key in LOSS_SIDE and key not in self.keys
        }
        if isinstance(block, Mapping):
            block = {key: value for key, value in block.items() if key not in of_its_loss}
        acting = {key: value for key, value in of_its_loss.items() if value not in (None, False, 0)}
        return block, [of_loss(self.system, key, value) for key, value in acting.items()]

    def outside(self, where: str, block: Any) -> dict[str, Any]:
        """Returns the keys of a file for slime that are outside the system's block."""
        if where == f"slime_ext.{self.system}":
            beside = {**self.values, **self.values["slime_ext"]}
            return {key: value for key, value in beside.items() if key not in ("slime_ext", self.system)}
        if self.system == "slime_mis" and not where:
            return {key: value for key, value in self.values.items() if key not in block}
        native = self.at("slime_ext")
        return {f"slime_ext.{key}": v for key, v in native.items()} if isinstance(native, Mapping) else {}

    def _places(self) -> tuple[str, ...]:
        """Returns the places of mappings that hold only a system's correction."""
        return (f"slime_ext.{self.system}", self.system, *self.home.blocks)

    def _known(self, place: str) -> dict[str, Any]:
        """Returns the part of the mapping at a place whose keys the system's block may have."""
        mapping = self.at(place)
        return {k: v for k, v in mapping.items() if k in self.keys} if isinstance(mapping, Mapping) else {}

    def _find(self) -> tuple[str, Any] | None:
        """Returns the place of the system's block below the root, and the block."""
        for place in self._places():
            if (block := self.at(place)) is not ABSENT:
                return place, {} if block is None else block  # null means no correction
        keys: dict[str, Any] = {}
        for place in self.home.among:
            keys |= self._known(place)
        is_loss_alone = self.system == "skyrl" and not keys.keys() - set(skyrl.LOSS)
        if not keys or (is_loss_alone and keys.get("policy_loss_type") is None):
            return None
        return self.home.among[0], keys

    def _distinct_keys(self) -> list[str]:
        """Returns the keys of the file that only this system has, of those with a reader."""
        others = {key for name, each in CONVERTED.items() if name != self.system for key in each.defaults}
        return [key for key in self.values if key in self.keys and key not in others]

    def _root(self) -> Any:
        """Returns the file as the block itself."""
        keys = self.keys
        unknown = [key for key in self.values if key not in keys]
        others = (
            name for name in CONVERTED if name != self.system and Whole(name, self.values).is_of_the_system()
        )
        is_certain = self.system in FLAT and any(key not in SHARED for key in self._distinct_keys())
        other = next(others, "") if unknown and not is_certain else ""
        # A file with mappings is a whole configuration, whose other keys may resemble the correction's.
        is_whole = any(isinstance(self.values[key], Mapping) for key in unknown)
        resembles = _nearly if is_whole else did_you_mean
        if other or (unknown and not any(key in keys or resembles(str(key), keys) for key in self.values)):
            if self.home.blocks or self.home.among:
                place = (*self.home.blocks, ".".join(filter(None, [*self.home.among[:1], self.home.name])))[0]
            else:
                place = f"the keys of {self.system} ({', '.join(keys)})"
            hint = f"it is a block of {other}; use --from {other}" if other else COMPOSED[self.system]
            raise ConfigError(f"{self.system}: expected {place}, got none: {hint}")
        self._forbid_two("")
        if self.system not in FLAT:
            return self.values
        known = keys if self.system == "slime_mis" else (*keys, *LOSS_SIDE)
        return {k: value for k, value in self.values.items() if k in known or _nearly(str(k), keys)}

    def _forbid_two(self, where: str) -> None:
        """Refuses a second correction of the file, which would not be read.

        Args:
            where: the place of the first, empty for the root.
        """
        homes = [place for place in self._places() if self.at(place) is not ABSENT]
        # Two such mappings hold one correction together, unless they have a key in common.
        among = [
            (key, f"{place}.{key}")
            for place in self.home.among
            for key in self._known(place)
            if key not in LOSS_SIDE
        ]
        repeated = [place for i, (key, place) in enumerate(among) if key in dict(among[:i])]
        homes += [*(place for _, place in among[:1]), *repeated]
        if not where:
            homes += [key for key in self.values if key in self.keys][:1]
        elif not where.startswith("slime_ext."):  # there the root holds slime's own flags, such as use_tis
            homes += [
                str(key)
                for key in self.values
                if str(key).startswith(self.home.stems) or key == self.home.name
            ]
        homes += [f"slime_ext.{key}" for key in NATIVE if self.at(f"slime_ext.{key}") is not ABSENT]
        homes = list(dict.fromkeys(homes))
        if len(homes) > 1:
            got = f"another at {cut(homes[1])}: remove the correction that the run does not use"
            raise ConfigError(f"{cut(homes[0])}: expected one correction in a file, got {got}")

    def _forbid_other_releases(self) -> None:
        """Refuses keys that correct something in another release, among keys of which most are foreign."""
        former, known = CONVERTED[self.system].former, [*self.keys, self.home.name]
        for place, key, value in self._foreign():
            is_misspelt = not place and _nearly(key, known)
            instead = former.get(key, "") if value not in (None, False) else ""
            if not instead and key.startswith(self.home.stems) and key not in known and not is_misspelt:
                instead = self.home.instead
            if instead:
                where = f"{place}.{cut(key)}".lstrip(".")
                expected = f"expected a key of the release of {self.system} that convert reads"
                raise ConfigError(f"{where}: {expected}, got another release's: {instead}")

    def _foreign(self) -> Iterator[tuple[str, str, Any]]:
        """Yields place, key and value of the mappings that hold keys of other parts of the system, too."""
        for place in (*self.home.among, *self.home.loss, *([""] if self.system in FLAT else [])):
            if isinstance(mapping := self.at(place), Mapping):
                yield from ((place, str(key), value) for key, value in mapping.items())

    def _check_beside(self, place: str, mapping: Mapping[str, Any]) -> None:
        """Refuses misspelt keys, and verl's flat keys beside the block that replaced them."""
        block = self.home.name
        flat = [key for key in mapping if key in self.keys]
        if self.system == "verl" and block in mapping and flat:
            got = f"got both: leave out the key that {self.system} ignores"
            where = f"{place}.{flat[0]}".lstrip(".")
            raise ConfigError(f"{where}: expected it or {block}, {got}")
        known = [*self.keys, *filter(None, [block]), *CONVERTED[self.system].former]
        for key in (str(key) for key in mapping if key not in known and place):
            if near := _nearly(key, known):
                raise ConfigError(
                    f"{place}: expected {near[0]}, got {cut(key)}: {self.system} does not know it"
                )


def _nearly(key: str, known: Sequence[str]) -> list[str]:
    """Returns a list with the known key that a misspelt key resembles. The list is empty without one."""
    return difflib.get_close_matches(key, known, n=1, cutoff=NEARLY)

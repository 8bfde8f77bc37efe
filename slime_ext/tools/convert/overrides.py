"""Reads the overrides of verl's program in a shell script as text. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

from slime_ext.config.files import read_yaml
from slime_ext.errors import ConfigError, cut, quoted

PROGRAM = "verl.trainer.main_ppo"
CALLERS_WORDS = ("$@", "$*", "${@}", "${*}")
ENDS = (">", ">>", "2>&1", "|", "&", ";")  # of a command
# What the program composes without an override, as far as it decides what the correction is.
BASE = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "vanilla"}}}}
PLACES = ("algorithm.rollout_correction", "actor_rollout_ref.actor", "trainer.use_v1")
# An override of Hydra: trainer.n=1, +algorithm.x=[1,2], ++a.b=, or ~a.b, which removes a key.
OVERRIDE = re.compile(r"(?P<how>\+{0,2}|~)(?P<key>[A-Za-z_][\w.@/]*)(?:=(?P<value>.*))?", re.S)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")  # $NAME or ${NAME}
# LR=1e-6, export LR="$1"
ASSIGNED = re.compile(r"(?:export\s+|readonly\s+|declare\s+|local\s+)?([A-Za-z_]\w*)=(.*)", re.S)


def read(path: str, text: str) -> tuple[dict[str, Any], list[str]]:
    """Returns what a script's overrides say about the correction, as the composed mapping, and notes.

    Raises:
        ConfigError: the script does not call the program exactly once, names another configuration, or an
            override of the correction is no plain value.
    """
    calls, variables = [], _variables(text)
    for words in _commands(text):
        calls += [words[i + 1 :] for i, word in enumerate(words) if word == PROGRAM]
    if len(calls) != 1:
        raise ConfigError(f"{path}: expected one call of {PROGRAM}, got {len(calls)}: {_how()}")
    composed: dict[str, Any] = {**BASE}
    notes = []
    for word in calls[0]:
        literal = VARIABLE.sub(lambda m: variables.get(m[1] or m[2], m[0]), word)
        if literal in ENDS:
            break
        if word in CALLERS_WORDS:
            notes.append(f"what the caller of the script adds ({word}) is not read")
            continue
        if (match := OVERRIDE.fullmatch(literal)) is None:
            raise ConfigError(f"{path}: expected key=value, got {quoted(cut(word))}: {_how()}")
        if match["key"].startswith(PLACES):
            _put(composed, match["key"].split("."), _value(path, word, literal, match))
    return composed, notes


def _value(path: str, word: str, literal: str, match: re.Match[str]) -> Any:
    """Returns the value of an override, which has no expansion left."""
    if match["value"] is None or match["how"] == "~" or "$" in literal or "`" in literal:
        raise ConfigError(f"{path}: expected a value of {match['key']}, got {quoted(word)}: {_how()}")
    return read_yaml(f"{path}: {match['key']}", text=match["value"])


def _how() -> str:
    return f"run python -m {PROGRAM} OVERRIDES --cfg job --resolve and convert what it prints"


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each line, with continued lines joined. Quotes over several lines are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        try:
            yield shlex.split(line, comments=True)
        except ValueError:
            continue


def _variables(text: str) -> dict[str, str]:
    """Returns the variables that one line sets, outside of any block, to a text without expansions."""
    assigned: dict[str, list[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = []
        for word in words:
            if match := ASSIGNED.fullmatch(word):
                # An indented line may be inside of a block that does not run.
                plain = len(words) == 1 and not line[:1].isspace() and not re.search(r"[$`*?]", match[2])
                assigned.setdefault(match[1], []).extend([match[2]] if plain else ["", ""])
        if words[:1] in (["for"], ["read"], ["select"]):
            for name in words[1:]:
                assigned.setdefault(name, []).extend(["", ""])
    return {name: values[0] for name, values in assigned.items() if len(values) == 1}


def _put(mapping: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = mapping.get(key)
        mapping[key] = dict(inner) if isinstance(inner, dict) else {}
        mapping = mapping[key]
    mapping[path[-1]] = value

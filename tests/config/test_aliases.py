"""Values that are larger than any message: refused in YAML, cut before they are written elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime_ext import load_config
from slime_ext.config.files import read_yaml
from slime_ext.config.foreign import SYSTEMS
from slime_ext.config.load import KEYS
from slime_ext.errors import ConfigError, check_known, cut, did_you_mean, shown
from slime_ext.hosts.flags import ARGUMENTS, check_kinds

ROOT = Path(__file__).parents[2]
LIMIT_S = 60  # before the fix none of them ended


def bomb(depth: int = 12) -> list:
    """10^depth items in depth + 1 lists."""
    value: list = ["x"] * 10
    for _ in range(depth - 1):
        value = [value] * 10
    return value


def as_yaml(template: str) -> str:
    """A file of 400 bytes in which ``BOMB`` is an alias of 1e9 items."""
    lines = ["x0: &x0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"x{i}: &x{i} [{','.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 9)]
    return "\n".join([*lines, template.replace("BOMB", "*x8")])


PLACED = (
    "slime_ext: {preset: BOMB}",
    "slime_ext: {steps: [{truncate: {high: BOMB}}]}",
    "slime_ext: BOMB",
    "BOMB : 1",
    "tis_clip: BOMB",
)


def test_aliases_that_multiply_are_one_line(tmp_path):
    """In a process of its own, which can be ended."""
    for i, template in enumerate(PLACED):
        (tmp_path / f"{i}.yaml").write_text(as_yaml(template))
    code = "import sys; from slime_ext.tools.commands import cli\n"
    code += "for file in sys.argv[1:]: cli.main(['check', file])"
    words = [sys.executable, "-c", code, *(str(tmp_path / f"{i}.yaml") for i in range(len(PLACED)))]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, check=False)
    lines = ran.stderr.splitlines()
    assert ran.stdout == "" and len(lines) == len(PLACED), ran.stderr
    assert all(
        re.search(r"values that the file writes, got \de\+09 with its aliases", line) for line in lines
    )


def test_an_alias_of_itself_is_refused_and_one_that_is_used_twice_is_not(tmp_path):
    (tmp_path / "c.yaml").write_text("a: &a [*a]")
    with pytest.raises(ConfigError, match="values that the file writes, got inf"):
        read_yaml(str(tmp_path / "c.yaml"))
    (tmp_path / "c.yaml").write_text("a: &a [1, 2]\nb: [*a, *a]")
    assert read_yaml(str(tmp_path / "c.yaml"))["b"] == [[1, 2], [1, 2]]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"a": list(range(20_000))}))
    assert len(read_yaml(str(tmp_path / "c.yaml"))["a"]) == 20_000


PLACES = {
    **{key: {key: bomb()} for key in KEYS},
    **{system: {system: bomb()} for system in SYSTEMS},
    "a preset in a list": {"preset": [bomb()]},
    "a step": {"steps": [bomb()]},
    "a step's fields": {"steps": [{"truncate": bomb()}]},
    "a field": {"steps": ["reweight", {"truncate": {"high": bomb()}}]},
    "a choice": {"steps": [{"reweight": {"level": bomb()}}]},
    "a surrogate's field": {"surrogate": {"ppo_clip": {"eps_low": bomb()}}},
    "a guard": {"guards": {"k3_kl": bomb()}},
    "a guard's field": {"guards": {"k3_kl": {"max": bomb()}}},
    "an option": {"metrics": {"file": bomb()}},
    "a number of another system": {"fireworks": {"cap": bomb()}},
    "a word of another system": {"verl": {"rollout_is": bomb()}},
}


def said(make):
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_a_message_about_a_value_of_1e12_items_ends(place):
    """A mapping in Python, where no file is read."""
    line = said(lambda: load_config(PLACES[place]))
    assert len(line) < 500 and "\n" not in line


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_message_about_an_argument_of_1e12_items_ends(name):
    if ARGUMENTS[name].kind.fits(bomb()):  # what the host derives
        return
    assert len(said(lambda: check_kinds(type("Args", (), {name: bomb()})()))) < 500


def test_what_is_cut_is_the_beginning_of_the_repr():
    values = [
        "x",
        "it's",
        ["a", {"b": (1,), 2: None}],
        (),
        [],
        {},
        {"k": [1.5, True, "x" * 50] * 9},
        "y" * 300,
        10**50,
        (1, 2),
        {"s": {1}},
    ]
    for value in values:
        whole = repr(value)
        assert shown(value) == (whole if len(whole) <= 100 else f"{whole[:97]}...")
        whole = str(value)
        assert cut(value) == (whole if len(whole) <= 100 else f"{whole[:97]}...")
    assert len(shown(1 << 100_000)) == 100 and len(cut([1 << 100_000])) == 100  # no decimal text in Python
    assert did_you_mean(cut(bomb()), ["a"]) == ""
    assert len(said(lambda: check_known("x", "key", bomb(), ["a"]))) < 200

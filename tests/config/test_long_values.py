"""Values that are larger than any message are cut before they are written."""

from __future__ import annotations

import pytest

from slime_ext import load_config
from slime_ext.config.foreign import SYSTEMS
from slime_ext.config.load import KEYS
from slime_ext.errors import ConfigError, check_known, cut, did_you_mean, quoted
from slime_ext.hosts.flags import ARGUMENTS, check_kinds


def bomb(depth: int = 12) -> list:
    """10^depth items in depth + 1 lists."""
    value: list = ["x"] * 10
    for _ in range(depth - 1):
        value = [value] * 10
    return value


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
        assert quoted(value) == (whole if len(whole) <= 100 else f"{whole[:97]}...")
        whole = str(value)
        assert cut(value) == (whole if len(whole) <= 100 else f"{whole[:97]}...")
    assert len(quoted(1 << 100_000)) == 100 and len(cut([1 << 100_000])) == 100  # no decimal text in Python
    assert did_you_mean(cut(bomb()), ["a"]) == ""
    assert len(said(lambda: check_known("x", "key", bomb(), ["a"]))) < 200

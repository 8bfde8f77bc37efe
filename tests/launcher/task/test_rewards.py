"""Rewards: the share of right positions, custom functions as slime calls them, nothing that is no number."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType

import pytest

from slime_ext.errors import ConfigError, DataError
from slime_ext.launcher.task import rewards

ARGS = Namespace(custom_rm_path=None, rm_type="characters")


def sample(response="dcba", label="dcba", status="completed", **more) -> Namespace:
    return Namespace(response=response, label=label, status=status, metadata={}, index=7, reward=None, **more)


@pytest.mark.parametrize(
    ("response", "ended", "expected"),
    [
        ("dcba", True, 1.0),
        ("dcba<eos>", True, 1.0),
        ("dcba", False, 4 / 5),
        ("dcbb", True, 4 / 5),
        ("dcb", True, 3 / 5),
        ("", True, 0.0),
        ("dcbaa", True, 4 / 6),
        ("abcd", True, 1 / 5),
        ("aaaaaaaaa", False, 1 / 10),
    ],
)
def test_characters_counts_positions_and_the_end(response, ended, expected):
    assert rewards.characters(response, "dcba", ended) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "ended", "expected"), [("ab<eos>", True, 1), ("ab", False, 0), ("b", True, 0)]
)
def test_exact_is_all_or_nothing(response, ended, expected):
    assert rewards.exact(response, "ab", ended) == expected


def test_a_batch_is_scored_in_order_and_kept_on_the_samples():
    batch = [sample(), sample(status="truncated"), sample(response="")]
    assert rewards.score(ARGS, batch) == pytest.approx([1.0, 0.8, 0.0])
    assert [s.reward for s in batch] == pytest.approx([1.0, 0.8, 0.0])


def test_a_reward_that_reads_as_a_number_is_kept_as_one(monkeypatch):
    batch = [sample(), sample()]
    rewards.score(custom(monkeypatch, lambda args, one: "0.5"), batch)
    assert [s.reward for s in batch] == [0.5, 0.5]


def test_a_line_may_name_its_own_reward():
    one = sample(status="truncated")
    one.metadata = {"rm_type": "exact"}
    assert rewards.score(ARGS, [one]) == [0.0]


def custom(monkeypatch, function) -> Namespace:
    module = ModuleType("my_rewards")
    module.reward = function
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return Namespace(**vars(ARGS) | {"custom_rm_path": "my_rewards.reward"})


async def _later(args, sample):
    return len(sample.response)


@pytest.mark.parametrize("function", [lambda args, sample: len(sample.response), _later])
def test_a_custom_reward_may_be_async(monkeypatch, function):
    assert rewards.score(custom(monkeypatch, function), [sample(), sample("ab")]) == [4.0, 2.0]


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), None, "good", {"other": 1}])
def test_a_reward_that_is_no_number_is_named(monkeypatch, answer):
    with pytest.raises(DataError, match="reward of sample 7: expected"):
        rewards.score(custom(monkeypatch, lambda a, s: answer), [sample()])


def test_a_missing_label_or_an_unknown_type_is_named():
    with pytest.raises(DataError, match="expected a label"):
        rewards.score(ARGS, [sample(label=None)])
    with pytest.raises(ConfigError, match="did you mean 'exact'"):
        rewards.check_rm_type("exakt")

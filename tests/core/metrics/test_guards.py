"""Guard rails: when they act, what they say, and what the configuration makes of them."""

from __future__ import annotations

import math

import pytest

from slime_ext.config.load import read_config
from slime_ext.core.metrics import guards
from slime_ext.core.metrics.guards import Guard, Watch
from slime_ext.core.metrics.options import Options
from slime_ext.errors import ConfigError

GEO = {"preset": "geo_rs"}


def alarms(guard, values, name="kept_fraction"):
    watch = Watch({name: guard})
    return [list(watch.look({f"off_policy/{name}": value}, f"step {i}")) for i, value in enumerate(values)]


def test_a_guard_waits_for_its_steps_in_a_row():
    said = alarms(Guard(min=0.1, steps=3), [0.0, 0.0, 0.5, 0.0, 0.0, 0.0])
    assert [len(step) for step in said] == [0, 0, 0, 0, 0, 1]


def test_a_step_that_a_host_trains_again_counts_once():
    watch, said = Watch({"kept_fraction": Guard(min=0.1, steps=3)}), []
    for step, value in ((0, 0.0), (1, 0.0), (1, 0.0), (2, 0.0), (2, 0.5), (3, 0.0)):
        said.append(len(list(watch.look({"off_policy/kept_fraction": value}, f"step {step}"))))
    assert said == [0, 0, 0, 1, 0, 0]


def test_it_is_said_again_ever_more_rarely():
    said = alarms(Guard(max=1.0), [2.0] * 10)
    assert [i + 1 for i, step in enumerate(said) if step] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("guard", "inside", "outside"),
    [
        (Guard(min=0.1, max=0.2), (0.1, 0.2), (0.09, 0.21, math.nan)),
        (Guard(min=0.1), (math.inf,), (0.05,)),
        (Guard(max=0.1), (-math.inf,), (math.nan, math.inf)),
        (Guard(min=0.1, max=0.1), (0.1,), ()),
    ],
)
def test_both_ends_are_inside_and_nan_is_outside(guard, inside, outside):
    assert all(map(guard.holds, inside)) and not any(map(guard.holds, outside))
    assert not any(alarms(guard, [*inside])) and all(alarms(guard, [value])[0] for value in outside)


@pytest.mark.parametrize(
    ("fields", "key"), [({}, "min"), ({"min": 0.2, "max": 0.1}, "min"), ({"min": 0.1, "steps": 0}, "steps")]
)
def test_a_guard_that_could_not_act_or_always_would_is_refused(fields, key):
    with pytest.raises(ConfigError, match=f"^{key}: expected"):
        Guard(**fields)


def test_the_line_says_what_was_expected_and_what_follows():
    (((action, line),),) = alarms(Guard(min=0.1, action="stop"), [0.03])
    assert action == "stop" and line == (
        "off_policy/kept_fraction: expected at least 0.1, got 0.03 in one optimizer step (step 0): the run "
        "stops, because the guard's action is stop"
    )


def test_a_metric_that_is_not_there_is_not_judged_and_ends_no_row():
    watch = Watch({"staleness_max": Guard(max=1, steps=2)})
    bad = {"off_policy/staleness_max": 2.0}
    said = [len(list(watch.look(values, f"step {i}"))) for i, values in enumerate(({}, bad, {}, {}, bad))]
    assert said == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (GEO, {"kept_fraction": Guard(min=0.1, steps=3, action="warn")}),
        ({"preset": "token_tis"}, guards.DEFAULT),
        (
            {
                "preset": "geo_rs",
                "guards": {"kept_fraction": {"min": 0.5, "action": "stop"}, "k3_kl": {"max": 1}},
            },
            {"kept_fraction": Guard(min=0.5, action="stop"), "k3_kl": Guard(max=1)},
        ),
        ({"guards": {"kept_fraction": None}, **GEO}, {}),
    ],
)
def test_guards_of_a_configuration_replace_the_default_of_their_metric(mapping, expected):
    assert read_config(mapping).guards == expected


def test_what_is_measured_is_configured_too():
    read = read_config({"preset": "geo_rs", "metrics": {"curves": "log", "file": "a.jsonl"}})
    assert read.metrics == Options(curves="log", file="a.jsonl")

"""The list of records in ``slime_ext.core`` against the records that optimizer steps really make."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from slime_ext import core, tis
from slime_ext.core.losses import SURROGATES
from slime_ext.core.state import Step
from slime_ext.core.terms import Term
from slime_ext.host import train_step, wrapping
from slime_ext.hosts.code import STEP
from tests import oracle
from tests.host import slime_rollouts as slime
from tests.test_tis import arguments, as_slime_calls

LISTED = re.findall(r"^    ([A-Z]\w+)  +\S", core.__doc__, re.MULTILINE)
CONFIGURATION = (Step, Term, *SURROGATES.values())
ALONE = [  # corrections of one micro-batch
    {"preset": "seq_is_rs"},
    {"preset": "pure_is", "terms": ["squared_log_ratio"]},
    {"steps": [{"prefix_budget": {"high": 0.1}}]},
    {
        "steps": [
            {"veto": {"low": 0.1}},
            {"reject": {"unit": "sequence", "high": 2.0, "over": "kept", "clamp": 3.0}},
        ]
    },
]
PLANNED = {
    "steps": ["reweight", "truncate", "normalize", {"reject": {"high": 2.0}}],
    **{"denominator": "kept", "group": "atomic"},
}


def is_record(cls):
    """Whether objects of the class hold what a call needs: no configuration, nothing private to a file."""
    ours = cls.__module__.startswith("slime_ext.") and not cls.__name__.startswith("_")
    return ours and not issubclass(cls, (*CONFIGURATION, BaseException))


def records_of(run):
    """The names of the records that a run makes."""
    names = set()

    def note(frame, event, _):
        if event != "call" or frame.f_code.co_name not in ("__init__", "<lambda>"):
            return
        held = frame.f_locals  # a namedtuple is made by a lambda of _cls
        cls = (
            type(held["self"]) if frame.f_code.co_name == "__init__" and "self" in held else held.get("_cls")
        )
        if isinstance(cls, type) and is_record(cls):
            names.add(cls.__name__)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def step_of(function, config, iterator=None, count=0):
    """An optimizer step of a host whose loss is the function."""
    module = ModuleType("host.model")

    def train_one_step(args, rollout_id, step_id, data_iterator, model, num_microbatches):
        function(args)
        return {"loss": 1.0}, 0.5

    module.train_one_step = train_one_step
    wrapping.wrap(module, STEP, train_step._measured)
    args = arguments(
        slime_ext=config, custom_tis_function_path="slime_ext.tis.correct", n_samples_per_prompt=slime.GROUP
    )
    module.train_one_step(args, 0, 0, [iterator], [SimpleNamespace(role="actor")], count)


def one_call(config):
    step_of(lambda args: tis.correct(args, **as_slime_calls(oracle.random_batch(2))), config)


def planned():
    data = slime.data_of(slime.samples(0, split=True))
    iterator, count = slime.DataIterator(data), data["num_microbatches"][0]

    def train(args):
        args.calculate_per_token_loss = False
        for _ in range(count):
            slime.trained(args, data, iterator.get_next(slime.PER_SAMPLE), (0, 1))

    step_of(train, PLANNED, iterator, count)


@pytest.fixture(scope="module")
def made():
    one_call(ALONE[0])  # what is made once per process is no record of a call
    found = records_of(planned)
    for config in ALONE:
        found |= records_of(lambda config=config: one_call(config))
    return found


def test_every_record_of_a_step_is_listed(made):
    """The reporter's own parts are what the configuration says."""
    configuration = {
        "Correction",
        "Setup",
        "Loaded",
        "Options",
        "WeightRange",
        "StepFile",
        "HostCode",
        "BuiltHook",
    }
    assert not made - set(LISTED) - configuration


def test_what_is_listed_is_made(made):
    """Head and support come from an engine, and the others before the first step, or not with one rank."""
    assert set(LISTED) - made <= {"Head", "Support", "Guard", "Parallel"}
    assert len(LISTED) == len(set(LISTED))

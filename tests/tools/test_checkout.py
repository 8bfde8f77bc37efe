"""A checkout answers what the same code answers once a process has loaded it."""

from __future__ import annotations

import inspect
from argparse import Namespace

import pytest

from slime_ext.errors import ConfigError
from slime_ext.hosts import running
from slime_ext.hosts.code import LEADING, PASSED
from slime_ext.tools.checkout import Checkout, checkout_in, named_checkout, signature_of
from tests.host import trees

PATCHED = f"{trees.TARGET}{trees.LOSS}\nTIS = {{'cur_log_probs': None, 'advantages': None}}\n"
TEXTS = {
    "as released": {},
    "patched": {"loss": PATCHED},
    "without a train step": {"step": ""},
    "other parameters": {"loss": f"{trees.TARGET}\ndef policy_loss_function(batch, logits): pass\n"},
    "other step": {"step": "def train_one_step(model, data): pass\n"},
    "no log-probs": {"loss": trees.LOSS},
}
ROOM = {"as released": "", "patched": 'can_reuse_log_probs_in_loss = train_data["weight_versions"] = 1\n'}


@pytest.mark.parametrize("layout", trees.LAYOUTS)
@pytest.mark.parametrize("name", TEXTS)
def test_a_checkout_says_what_the_loaded_host_says(tmp_path, monkeypatch, layout, name):
    made = trees.made(tmp_path, monkeypatch, layout, **TEXTS[name])
    room = tmp_path.joinpath(*trees.LAYOUTS[layout][0].split(".")).parent
    (room / "near.py").write_text("import nothing\n" + ROOM.get(name, ""))
    (tmp_path / "train.py").touch()
    live, read = running.current(), checkout_in(tmp_path)
    assert (read.name, read.loss_module) == (made.package, live.loss_module)
    for said in ("has_step", "carries_versions", "fault"):
        assert getattr(read, said) == getattr(live, said), said
    assert [read.passes(keyword) for keyword in PASSED] == [live.passes(k) for k in PASSED]
    assert [read.defines(n) for n in LEADING] == [live.defines(n) for n in LEADING]
    assert read.may_skip_proximal is (name == "patched")  # of a loaded one: tests/host/test_startup.py


def test_a_flag_is_one_of_its_parsers(tmp_path):
    (tmp_path / "slime/backends").mkdir(parents=True)
    (tmp_path / "slime/arguments.py").write_text('parser.add_argument("--use-tis", action="store_true")\n')
    read = Checkout(tmp_path / "slime")
    assert read.accepts("use_tis", Namespace()) and not read.accepts("use_ti", Namespace())


def test_a_folder_that_is_no_checkout_is_one_line(tmp_path):
    (tmp_path / "slime/backends").mkdir(parents=True)
    assert checkout_in(tmp_path) is None
    with pytest.raises(ConfigError, match=r"^--host .*: expected a checkout of slime or miles, got no train"):
        named_checkout(str(tmp_path))


def a_function(first, /, second, third=3, *rest, fourth, fifth=5, **more):
    """One of every kind of parameter."""


def test_a_signature_is_that_of_the_loaded_function():
    text = "async def other(): ...\n" + inspect.getsource(a_function)
    loaded = inspect.signature(a_function).parameters.values()
    read = signature_of(text, "a_function").parameters.values()
    assert [(p.name, p.kind, p.default is p.empty) for p in read] == [
        (p.name, p.kind, p.default is p.empty) for p in loaded
    ]
    assert signature_of(text, "absent") is None and signature_of("def a_function(:", "a_function") is None

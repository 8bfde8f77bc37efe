"""What a host's source says about it, on text like that of real releases."""

from __future__ import annotations

import pytest

from slime_ext.host import hosts

ACTOR = "slime.backends.megatron_utils.actor"
LOSS = "slime.backends.megatron_utils.loss"


@pytest.fixture
def slime(monkeypatch):
    """slime with the given texts for its modules."""

    def with_sources(**texts):
        by_module = {f"{hosts.SLIME.package}.{name}": text for name, text in texts.items()}
        monkeypatch.setattr(hosts.Host, "source", lambda self, module: by_module.get(module, ""))
        return hosts.SLIME

    return with_sources


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ('"cur_log_probs": log_probs_and_entropy["log_probs"],', True),
        ("'current_log_probs' : x,", True),
        ("cur_log_probs = log_probs", False),
        ("", False),
    ],
)
def test_whether_the_hook_call_carries_the_target(slime, text, passes):
    assert slime(loss=text).passes_target is passes


@pytest.mark.parametrize(
    ("call", "seen"), [("(self.args, rollout_id, rollout_data)", True), ("(self.args)", False)]
)
def test_whether_the_postprocess_sees_the_rollout(slime, call, seen):
    assert slime(actor=f"self.rollout_data_postprocess{call}").hands_out_data is seen


def test_whether_proximal_log_probs_may_be_skipped(slime):
    assert slime(actor="can_reuse_log_probs_in_loss = (").may_skip_proximal
    assert not slime(actor="").may_skip_proximal


def test_a_host_that_is_not_installed_has_neither_source_nor_version():
    assert hosts.MILES.source("miles.backends.nowhere") == ""
    assert hosts.MILES.version == "(a checkout)"


def test_the_source_of_a_module_is_read_without_importing_it():
    assert "def train_step" in hosts.SLIME.source("slime_ext.launcher.megatron.step")

"""Which rules there are, in what order they are judged, and what is raised, printed or left unchecked."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from slime_ext.config.load import Loaded
from slime_ext.core.correction import Correction
from slime_ext.core.steps import Reject, Reweight, Truncate
from slime_ext.errors import ConfigError
from slime_ext.hosts.flags import ARGUMENTS
from slime_ext.rules.judge import RULES, broken, require, verdict
from slime_ext.rules.of_losses import expected_weight
from slime_ext.rules.rule import LAUNCH, REFUSE, BrokenRuleError, Line, Rule, Severity
from slime_ext.rules.setup import Setup
from tests.rules.launches import AGES, ALONE, CUSTOM_LOSS, INIT, setup_of


def test_a_rules_name_and_docstring_say_what_it_judges():
    for name, rule in RULES.items():
        assert rule.name == name and rule.judge.__doc__.endswith(".") and "\n" not in rule.judge.__doc__, name


def test_a_line_ends_with_the_rules_name_and_what_is_raised_does_not():
    setup = setup_of(loss_type="sft_loss")
    (line,) = broken(setup, (REFUSE,), [RULES["sft_beside_function"]])
    assert str(line) == f"{line.message} [sft_beside_function]" and str(Line("a note")) == "a note"
    with pytest.raises(BrokenRuleError) as caught:
        require(setup)
    assert str(caught.value) == line.message and caught.value.rule is RULES["sft_beside_function"]


def test_what_cannot_be_judged_is_named_with_the_reason():
    setup = setup_of(of=AGES, **INIT)
    unread = Setup(setup.args, setup.function, setup.loaded, {"loss_type"})
    reasons = {line.rule.name: line.message for line in verdict(unread).unread}
    assert reasons["sft_beside_function"] == "--loss-type is known only where the script runs"
    assert "missing_weight_versions" not in reasons
    (line,) = verdict(unread).unasked
    assert line.rule.name == "missing_weight_versions"
    assert line.message.startswith(
        "whether this host's trainer gets the samples' weight versions, which slim"
    )
    assert line.message.endswith(": no checkout of the host is here; name one with --host DIR")


@pytest.mark.parametrize("more", [{}, ALONE], ids=["function", "init"])
def test_a_users_loss_whose_source_is_not_here_is_not_judged(more):
    setup = setup_of(**{**CUSTOM_LOSS, "custom_loss": None, **more})
    assert not any("custom_loss" in line.message for line in verdict(setup).broken)
    (line,) = verdict(setup).unasked
    assert line.message == (
        "whether my.loss calls policy_loss_function, which alone calls the hook: its source is not here"
    )


def test_a_rule_that_reads_a_name_outside_the_list_fails():
    def reads_unlisted(s):
        return s.flags.use_tis or s.flags.unlisted

    with pytest.raises(KeyError, match="ARGUMENTS: expected unlisted, which a rule reads, got none: add it"):
        require(Setup(SimpleNamespace()), rules=(Rule(reads_unlisted, REFUSE, LAUNCH),))


@pytest.mark.parametrize("name", RULES)
def test_every_rule_reads_listed_arguments_alone_and_is_left_out_where_none_is_known(name):
    """Its whole condition and its message, with everything on and with everything off."""
    rules = (RULES[name],)
    correction = Correction("target", steps=(Reweight(), Reject("sequence", "ratio", high=2.0)))
    for value in (None, True, 2):
        args = SimpleNamespace(**dict.fromkeys(ARGUMENTS, value), slime_ext={})
        setup = Setup(args, "correct", Loaded(correction), file=("high", "kl_coef"))
        assert all("\n" not in line.message for line in broken(setup, tuple(Severity), rules))
        unknown = Setup(args, "correct", Loaded(correction), {*ARGUMENTS, "slime_ext"})
        assert not [*broken(unknown, tuple(Severity), rules)]


def test_the_expected_weight_of_a_long_response_is_that_of_sampled_ones():
    """Against a sum over a fine grid of standard normal numbers."""
    for tokens, k3, cap in ((8192, 1e-3, 2.0), (1000, 1e-3, 5.0), (50, 0.01, 1.0)):
        spread = math.sqrt(2 * tokens * k3)
        grid = [i / 1000 for i in range(-10000, 10001)]
        density = [math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / 1000 for z in grid]
        weights = [min(math.exp(-(spread**2) / 2 + spread * z), cap) for z in grid]
        mean = math.fsum(d * w for d, w in zip(density, weights, strict=True))
        assert expected_weight(tokens, k3, cap) == pytest.approx(
            (mean, min(math.exp(-tokens * k3), cap)), rel=1e-4
        )
    assert expected_weight(100, 1e-3, math.inf)[0] == 1


def test_a_rule_that_reads_what_is_not_known_is_left_out():
    args = SimpleNamespace(use_tis=True, use_rollout_logprobs=True)
    loaded = Loaded(Correction(steps=(Reweight(), Truncate())))
    with pytest.raises(ConfigError, match="--use-rollout-logprobs: expected off beside --use-tis"):
        require(Setup(args, "correct", loaded))
    require(Setup(args, "correct", loaded, {"use_rollout_logprobs"}))

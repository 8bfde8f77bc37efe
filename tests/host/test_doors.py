"""Each door says what a rule says: ``slime-ext check``, ``init`` at start-up, the first call of the hook.

tests/rules/table.py has what each rule says of which arguments. A door asks all rules of one severity and one
subject alike, so one rule stands here for each pair that there is.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from slime_ext import host, tis
from slime_ext.errors import ConfigError
from slime_ext.hosts.contract import flag_of
from slime_ext.rules.judge import RULES
from slime_ext.rules.rule import HOST, REFUSE, WARN, Subject
from tests import oracle
from tests.test_tis import as_slime_calls
from tests.tools.commands.in_process import run, written

pytestmark = pytest.mark.usefixtures("in_process")
TARGET = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
MISPLACED = {"slime_ext": {"preset": "token_tis"}, "steps": []}
INIT = {"custom_megatron_init_path": "slime_ext.host.init"}


def ours(name, **more):
    return {"use_tis": True, "custom_tis_function_path": f"slime_ext.tis.{name}", **more}


CASES = [  # rule, arguments, the keys of --custom-config-path, line
    (
        "misplaced_key",
        ours("correct", **INIT),
        MISPLACED,
        "--custom-config-path: expected the key steps under slime_ext, got it beside slime_ext, where "
        "nothing reads it: indent it; if it is an argument of your own, rename it",
    ),
    (
        "function_never_called",
        ours("token_tis", **INIT) | {"use_tis": False},
        {},
        "--use-tis: expected on beside --custom-tis-function-path, got off: add --use-tis, because without "
        "it the host never calls the function; for metrics alone, remove --custom-tis-function-path, because "
        "slime_ext.host.init measures without it",
    ),
    (
        "target_counted_twice",
        ours("correct", num_steps_per_rollout=4, **INIT),
        {"slime_ext": TARGET},
        "slime_ext.numerator: expected proximal beside the host's surrogate with 4 optimizer steps per "
        "rollout or --keep-old-actor, got target: use numerator: proximal or surrogate: reinforce, because "
        "the host's loss has the factor target / proximal already",
    ),
    (
        "rollout_logprobs_beside_tis",
        ours("glm5", use_rollout_logprobs=True, **INIT),
        {},
        "--use-rollout-logprobs: expected off beside --use-tis, got on: remove one, because the host refuses "
        "the two together",
    ),
    (
        "unread_tis_clip",
        ours("token_tis", tis_clip=5.0, **INIT),
        {},
        "--tis-clip: expected none beside slime_ext.tis.token_tis, got 5: remove the flag, because only "
        "slime_ext.tis.vanilla_tis_function and icepop_function read such bounds; to set a cap, write "
        "truncate: {high: ...} under slime_ext.steps",
    ),
    (
        "off_policy_is_counted_twice",
        ours("off_policy_is_function", num_steps_per_rollout=2, eps_clip=0.2, **INIT),
        {},
        "off_policy_is_function: expected one optimizer step per rollout and no --keep-old-actor, got 2 "
        "steps: use slime_ext.tis.off_policy_is, because the host's loss has the factor target / proximal "
        "already, and the ratio is counted twice",
    ),
    (
        "sft_beside_init",
        {"loss_type": "sft_loss", **INIT},
        {},
        "--loss-type: expected policy_loss beside slime_ext, got sft_loss: leave out slime_ext's flags, "
        "because there is no policy loss to measure or correct",
    ),
    (
        "missing_metrics",
        ours("token_tis"),
        {},
        "no metrics: in slime add --custom-megatron-init-path slime_ext.host.init",
    ),
]
NAMES = [name for name, *_ in CASES]
HOOKED = [case for case in CASES if "custom_tis_function_path" in case[1]]


def test_every_kind_of_rule_is_here():
    kinds = {(rule.severity, rule.subject) for rule in RULES.values()}
    assert kinds == {(RULES[name].severity, RULES[name].subject) for name, *_ in CASES}


def launch_of(flags, keys, folder, monkeypatch):
    """The arguments as a host that has read the file holds them, and a script with the same flags."""
    monkeypatch.chdir(folder)
    if keys:
        flags = flags | {"custom_config_path": "c.yaml"}
        (folder / "c.yaml").write_text(yaml.safe_dump(keys))
    given = {flag_of(dest): value for dest, value in flags.items() if value}
    words = " ".join(flag if value is True else f"{flag} {value}" for flag, value in given.items())
    script = written(folder / "run.sh", f"python3 train.py {words}")
    return SimpleNamespace(**{"use_tis": False, **flags, **keys}), script


@pytest.mark.parametrize(("name", "flags", "keys", "line"), CASES, ids=NAMES)
def test_check_prints_it_with_the_name(name, flags, keys, line, capsys, tmp_path, monkeypatch):
    _, script = launch_of(flags, keys, tmp_path, monkeypatch)
    status, out, err = run(capsys, "check", script)
    if RULES[name].severity in (REFUSE, HOST):
        assert (status, out, err) == (1, "", f"slime-ext check: {line} [{name}]\n")
    else:
        said = " ".join(out.split())
        kind, last = ("warning", "ok; 1 warning") if RULES[name].severity is WARN else ("note", "ok")
        assert (status, said.count("]"), err) == (0, 1, "")
        assert said.endswith(f" {kind} {line} [{name}] {last}")


@pytest.mark.parametrize(("name", "flags", "keys", "line"), CASES, ids=NAMES)
def test_init_raises_it_or_logs_it(name, flags, keys, line, caplog, tmp_path, monkeypatch):
    args, _ = launch_of(flags, keys, tmp_path, monkeypatch)
    if RULES[name].severity is REFUSE:
        with pytest.raises(ConfigError) as caught:
            host.init(args)
        assert str(caught.value) == line
    else:
        host.init(args)
        assert caplog.messages == ([line] if RULES[name].severity is WARN else [])


@pytest.mark.parametrize(("name", "flags", "keys", "line"), HOOKED, ids=[name for name, *_ in HOOKED])
def test_the_first_call_of_the_hook_says_it_where_it_knows_enough(
    name, flags, keys, line, caplog, tmp_path, monkeypatch
):
    """Without ``init``, and in no host, a call knows the file and the correction."""
    args, _ = launch_of(flags, keys, tmp_path, monkeypatch)
    hook = getattr(tis, args.custom_tis_function_path.rpartition(".")[2])
    call = as_slime_calls(oracle.random_batch(0))
    severity = RULES[name].severity if RULES[name].subject in (Subject.FILE, Subject.CORRECTION) else None
    if severity is REFUSE:
        with pytest.raises(ConfigError) as caught:
            hook(args, **call)
        assert str(caught.value) == line
    else:
        hook(args, **call)
        assert [said for said in caplog.messages if said == line] == [line] * (severity is WARN)

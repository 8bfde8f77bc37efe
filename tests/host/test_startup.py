"""What ``slime_ext.host.init`` refuses beside the rules, what it lets through, and what it says.

tests/rules/table.py has the rules, and ``test_doors.py`` shows that ``init`` asks them.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace

import pytest
import yaml

from slime_ext import host
from slime_ext.core.fields import LARGEST
from slime_ext.core.steps import Clip, Reject, Reweight
from slime_ext.errors import ConfigError
from slime_ext.host import configured
from slime_ext.hosts.flags import check_kinds
from slime_ext.rules.setup import Setup
from slime_ext.tools.check.lines import judged
from slime_ext.tools.check.run import check_file
from slime_ext.tools.check.setup import Case, Use, as_parsed, with_functions
from slime_ext.tools.commands.check_answer import answer_of
from slime_ext.tools.launch.launch import Launch
from slime_ext.tools.launch.sources import Sources
from tests.host import trees

TOKEN = "slime_ext.tis.token_tis"
PLANNED = {"steps": ["reweight", {"truncate": {"high": 2.0}}, "normalize"]}


def arguments(**more):
    return Namespace(**{"use_tis": True, "custom_tis_function_path": TOKEN, **more})


def checked(args, script="run.sh", file=()):
    """What ``check`` answers where a launch has these arguments."""
    launch = Launch(script)
    setup = with_functions(Setup(Namespace(**args), file=file), launch)
    return answer_of(*judged(Case(Sources(launch), setup, Use.KNOWN)))


def refusal(**more):
    with pytest.raises(ConfigError) as caught:
        host.init(arguments(**more))
    assert "\n" not in str(caught.value)
    return str(caught.value)


OURS = {name: {"custom_tis_function_path": f"slime_ext.tis.{name}_function"}
        for name in ("vanilla_tis", "icepop", "off_policy_is")}  # fmt: skip
CORRECT = {"custom_tis_function_path": "slime_ext.tis.correct"}
INIT = "slime_ext.host.init"


def correct(mapping, **more):
    return {**CORRECT, "slime_ext": mapping, **more}


TARGET = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
PLANNING = correct(PLANNED)
FOUR = {"num_steps_per_rollout": 4}
# fmt: off
BROKEN = [
    # values as YAML has them
    ({"use_tis": "false"}, "--use-tis: expected true or false, got 'false'"),
    ({**OURS["vanilla_tis"], "tis_clip": "2e0"}, "--tis-clip: expected a number (YAML reads 1e-4 as text; w"),
    ({"eps_clip": float("nan")}, "--eps-clip: expected a number"),
    ({"num_steps_per_rollout": "1"}, "--num-steps-per-rollout: expected a whole number above 0, got '1'"),
    ({"rollout_data_postprocess_path": 5}, "--rollout-data-postprocess-path: expected package.module.func"),
    # bounds of the seeds' functions, and of surrogates that read the host's
    ({**OURS["icepop"], "tis_clip": 1.0, "tis_clip_low": 2.0}, "--tis-clip: expected more than "
     "--tis-clip-low 2.0, got 1.0: every weight would be the same"),
    ({**OURS["vanilla_tis"], "tis_clip": 0.5}, "--tis-clip: expected a number >= 1, got 0.5: below 1 it wo"),
    ({**OURS["icepop"], "tis_clip_low": 1.5}, "--tis-clip-low: expected a number in [0, 1], got 1.5"),
    ({**OURS["off_policy_is"], "eps_clip": -1}, "--eps-clip: expected a number >= 0, got -1"),
    ({**OURS["off_policy_is"], "eps_clip": 0.2, "eps_clip_high": -0.5}, "--eps-clip-high: expected a number"),
    ({**OURS["off_policy_is"], "eps_clip": 0.0}, "--eps-clip: expected eps_low or eps_high above 0"),
    # the functions
    ({"custom_tis_function_path": "slime_ext.tis.tokn_tis"}, "did you mean 'token_tis'"),
    ({"custom_rollout_log_function_path": "slime_ext.host.log_rolout"}, "log_rollout'"),
    ({"custom_rollout_log_function_path": "slime_ext.host.generate"}, "--custom-rollout-log-function-path: "
     "expected slime_ext.host.log_rollout of slime_ext, got 'slime_ext.host.generate'"),
    ({"custom_tis_function_path": "mis.py:compute"}, "expected package.module.function"),
    ({"custom_tis_function_path": "slime-ext.tis.token_tis"}, "got 'slime-ext.tis.token_tis': "),
    ({"custom_tis_function_path": "slime_ext.tis.gspo"}, "gspo is an estimator of the host: type --advantag"),
    ({"custom_tis_function_path": f"{__name__}.takes_too_little"}, "--custom-tis-function-path"),
    # the configuration
    ({"slime_ext": {"steps": ["truncat"]}}, "did you mean 'truncate'"),
    (correct({"fireworks": {"cap": 5.0}}), "slime-ext convert --from fireworks FILE"),
    ({"slime_ext": {"verl": {"rollout_is": "token"}}}, "slime-ext convert --from verl FILE"),
]
# fmt: on


INFINITE = [  # function, the host's bounds -> the steps after reweight
    ("vanilla_tis", {"tis_clip_low": 0, "tis_clip": math.inf}, ()),
    ("vanilla_tis", {"tis_clip_low": 0.5, "tis_clip": math.inf}, (Clip(0.5, LARGEST),)),
    ("off_policy_is", {"eps_clip": 0.2, "eps_clip_high": math.inf}, (Clip(0.8, LARGEST),)),
    ("icepop", {"tis_clip_low": 0, "tis_clip": math.inf}, ()),
    ("icepop", {"tis_clip_low": 0.5, "tis_clip": math.inf}, (Reject("token", low=0.5),)),
]


@pytest.mark.parametrize(("name", "bounds", "steps"), INFINITE)
def test_an_infinite_bound_of_the_host_is_none(name, bounds, steps):
    function = f"{name}_function"
    setup = configured.setup_for(arguments(**OURS[name], **bounds), function)
    assert setup.loaded.correction.steps == (Reweight(), *steps)


def takes_too_little(args):
    """A function that no hook's call fits."""


def takes_everything(*args, **kwargs):
    """A function that every call fits."""


@pytest.mark.parametrize(("more", "line"), BROKEN, ids=range(len(BROKEN)))
def test_init_and_check_refuse_it_for_the_same_reason(more, line):
    assert line in refusal(**more)
    args = as_parsed(vars(arguments(custom_megatron_init_path=INIT, **more)))
    with pytest.raises(ConfigError) as caught:
        check_kinds(Namespace(**args))
        checked(args)
    assert line in str(caught.value)


LET_THROUGH = [  # what a rule lets through has its row in tests/rules/table.py
    {},
    {**OURS["vanilla_tis"], "tis_clip": float("inf"), "eps_clip_high": float("inf")},
    {**OURS["vanilla_tis"], "tis_clip": 1, "tis_clip_low": None},
    {**OURS["icepop"], "tis_clip": 5, "tis_clip_low": 0.5},
    {**OURS["off_policy_is"], "eps_clip": 0, "eps_clip_high": 0.2},
    {"tis_clip": 0, "eps_clip": -1},  # which token_tis does not read
    # another's function, or a seed's, beside which ours measures
    {**OURS["icepop"], "slime_ext": {"guards": {"k3_kl": {"max": 0.1}}}},
    {"custom_tis_function_path": f"{__name__}.takes_everything",
     "slime_ext": {"guards": {"k3_kl": {"max": 0.1}}}},
    {"custom_generate_function_path": "of_the_rollout_alone.generate"},
]  # fmt: skip


@pytest.mark.parametrize("more", LET_THROUGH, ids=range(len(LET_THROUGH)))
def test_what_can_work_is_let_through(more, capsys):
    host.init(arguments(**more))
    assert capsys.readouterr().out.count("\n") == 1


SAID = [
    ({}, "token_tis: proximal / behavior, loss host, reweight(token) > truncate(high 2), masks policy"),
    ({"use_tis": False, "get_mismatch_metrics": True}, "metrics only, the loss stays as it is: token_tis"),
    ({"use_tis": False, "custom_tis_function_path": None}, "no correction, only metrics (--use-tis is off)"),
    ({"custom_tis_function_path": None}, "the correction is the host's own, not one of slime_ext"),
    ({"custom_tis_function_path": f"{__name__}.takes_everything"}, "takes_everything, not one of slime_ext"),
    ({**OURS["off_policy_is"], "eps_clip": 0.2, "eps_clip_high": 0.28},
     "off_policy_is_function: target / behavior, loss host, reweight(token) > clip(low 0.8, high 1.28)"),
    ({**OURS["vanilla_tis"], "tis_clip": 2.0, "tis_clip_low": 0},
     "vanilla_tis_function: proximal / behavior, loss host, reweight(token) > clip(low 0, high 2)"),
]  # fmt: skip


def test_one_line_says_what_runs_with_which_numbers(capsys):
    for more, said in SAID:
        host.init(arguments(**more))
        out = capsys.readouterr().out
        assert out.startswith("slime_ext: ") and said in out and out.count("\n") == 1


SKIPS = "can_reuse_log_probs_in_loss = True\n"  # in the room of the loss, as slime has it since v0.3.0
PASSES = f"{trees.TARGET}{trees.LOSS}\nTIS = {{'cur_log_probs': None}}\n"


def test_a_rollout_without_proximal_log_probs_cannot_be_planned(tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch)
    host.init(arguments(**PLANNING, num_steps_per_rollout=1))
    (tmp_path / "slime/backends/megatron_utils/__init__.py").write_text(SKIPS)
    assert "--get-mismatch-metrics: expected on" in refusal(**PLANNING, num_steps_per_rollout=1)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"loss": PASSES}, "passes cur_log_probs itself"),
        ({}, "init passes cur_log_probs and advantages to the hook"),
    ],
)
def test_it_says_how_the_target_arrives(tmp_path, monkeypatch, capsys, texts, said):
    trees.made(tmp_path, monkeypatch, **texts)
    host.init(arguments())
    assert said in capsys.readouterr().out


def test_a_hook_that_a_patched_host_would_break_is_refused(tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch, loss=PASSES)
    line = refusal(custom_tis_function_path=f"{__name__}.for_a_stock_host")
    assert line.endswith("add **kwargs to it")


def test_a_correction_that_needs_init_is_refused_at_the_first_hook_call_without_it(tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch)
    args = arguments(**CORRECT, slime_ext=PLANNED, get_mismatch_metrics=True)
    with pytest.raises(ConfigError, match="without init each micro-batch is treated as an optimizer step"):
        configured.setup_for(args, "correct")
    assert configured.setup_for(arguments(), "token_tis").correction.steps


def test_a_trainer_without_megatron_is_told_what_is_not_seen(tmp_path, monkeypatch, caplog):
    trees.made(tmp_path, monkeypatch, "miles main", step="")
    host.init(arguments())
    (line,) = caplog.messages
    assert line.startswith(
        "miles: expected train_one_step among its loaded modules, got none, as in trainers"
    )
    assert "expected a trainer with train_one_step beside a correction" in refusal(**PLANNING)


def for_a_stock_host(
    args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths
):
    """A third party's hook, written for slime as it is."""


def test_the_names_that_flags_give_are_there():
    assert {"init", "rollout_data_postprocess", "log_rollout"} <= set(dir(host))
    with pytest.raises(AttributeError, match="has no attribute 'inti'"):
        host.inti  # noqa: B018


SAYS = f"{trees.TARGET}{trees.LOSS}\ndef get_pg_loss_type(args):\n    "


def test_the_surrogate_is_what_the_host_says_it_is(tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch, loss=SAYS + "return 'reinforce'")
    host.init(arguments(**correct(TARGET, **FOUR)))
    trees.made(tmp_path, monkeypatch, loss=SAYS + "return 'ppo'")
    assert "slime_ext.numerator" in refusal(**correct(TARGET, advantage_estimator="rloo", **FOUR))
    trees.made(tmp_path, monkeypatch, loss=SAYS + "raise ValueError('reinforce cannot combine')")
    assert refusal() == "--pg-loss-type: reinforce cannot combine"


def both(tmp_path, text, **more):
    """What ``check`` and ``init`` say of a file and the flags beside it; "" where they let it pass."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    flags = {"use_tis": True, "custom_tis_function_path": "slime_ext.tis.correct", **more}
    inside = yaml.safe_load(text)
    args = {**flags, **inside}
    said = []
    for call in (
        lambda: checked(args, script="", file=tuple(inside)),
        lambda: host.init(Namespace(custom_config_path=str(path), **args)),
    ):
        try:
            call()
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    return said


LOST = {
    "steps: [reweight]": "the key steps under slime_ext,",
    "guards: {kept_fraction: {min: 0.1}}": "the key guards under slime_ext,",
    "preset: token_tis": "the key preset under slime_ext,",
    "verl: {rollout_is: token}": "no key of verl beside slime_ext, got verl: remove it, or translate",
    "use_rs: true": "slime-ext convert --from slime_mis FILE; if it is an argument of your own, rename it",
    "truncate: {high: 2.0}": "the key truncate in a step's place under slime_ext.steps,",
    "high: 3.0": "the key high as a field of a step under slime_ext.steps,",
    "ppo_clip: {anchor: behavior}": "the key ppo_clip under slime_ext.surrogate,",
    "tau_pos: 2.0": "the key tau_pos as a field under slime_ext.surrogate,",
    "action: stop": "the key action as a field of a metric under slime_ext.guards,",
    "ess_weight: {min: 0.1}": "the key ess_weight under slime_ext.guards,",
    "curves: none": "the key curves under slime_ext.metrics,",
}


@pytest.mark.parametrize(("line", "place"), LOST.items())
def test_a_key_whose_indentation_was_lost_is_refused_with_its_place(tmp_path, line, place):
    for mapping in ("{numerator: target, surrogate: reinforce}", ""):
        for said in both(tmp_path, f"slime_ext: {mapping}\n{line}\n"):
            assert said.startswith("--custom-config-path: expected ") and place in said


def test_a_preset_of_the_flag_is_not_left_alone_with_keys_that_nothing_reads(tmp_path):
    said = both(tmp_path, "steps: [reweight]", custom_tis_function_path=TOKEN)
    assert all("the key steps under slime_ext" in line for line in said)


@pytest.mark.parametrize(
    "line", ["eps_clip: 0.2", "loss_type: policy_loss", "my_own: {high: 3}", "tis_clip: 2.0"]
)
def test_arguments_of_the_host_and_of_the_user_are_let_through(tmp_path, line):
    assert both(tmp_path, f"slime_ext: {{preset: token_tis}}\n{line}\n") == ["", ""]


@pytest.mark.parametrize(
    ("line", "right"),
    [
        (
            "slime-ext: {steps: [reweight, {truncate: {high: 9}}]}",
            "expected the key slime_ext, got slime-ext",
        ),
        (
            "slime_exts: {guards: {k3_kl: {max: 1, action: stop}}}",
            "expected the key slime_ext, got slime_exts",
        ),
        ("tis-clip: 5", "expected tis_clip, got tis-clip: slime ignores a name it does not know"),
        ("tis_clip_lo: 0.5", "expected tis_clip_low, got tis_clip_lo: slime ignores"),
    ],
)
def test_a_misspelt_key_is_refused_by_init_and_check(tmp_path, line, right):
    path = tmp_path / "c.yaml"
    path.write_text(line)
    inside = yaml.safe_load(line)
    for function in (TOKEN, OURS["vanilla_tis"]["custom_tis_function_path"]):
        args = {"use_tis": True, "custom_tis_function_path": function, "custom_config_path": str(path)}
        for call in (lambda args=args: host.init(Namespace(**args, **inside)), lambda: check_file(str(path))):
            with pytest.raises(ConfigError, match=re.escape(right)):
                call()


def test_guards_beside_slimes_own_functions_watch_what_these_do(tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch)
    guards = {"kept_fraction": {"min": 0.5, "action": "metrics_only"}, "clipped_fraction": {"max": 0.5}}
    args = arguments(**OURS["vanilla_tis"], slime_ext={"guards": guards}, custom_megatron_init_path=INIT)
    setup = configured.setup_for(args)
    assert {*guards} <= setup.loaded.guards.keys() and setup.correction.steps
    dropping = {"clipped_fraction": {"max": 0.5}}
    assert "no step bounds weights" in refusal(**OURS["icepop"], slime_ext={"guards": dropping})


def test_a_file_that_another_function_reads_is_none_of_ours(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("level: token\nhigh: 3")
    host.init(
        arguments(custom_tis_function_path=f"{__name__}.takes_everything", custom_config_path=str(path))
    )
    host.init(arguments(custom_config_path=str(tmp_path / "on another machine.yaml")))


def test_keys_of_anothers_hook_are_left_to_it_beside_guards_of_ours(tmp_path):
    """slime's mis.py reads use_rs and tis_level at the top of the file."""
    theirs = {"custom_tis_function_path": f"{__name__}.takes_everything"}
    text = "slime_ext: {guards: {k3_kl: {max: 0.1}}}\nuse_rs: true\ntis_level: token\nhigh: 3\n"
    assert both(tmp_path, text, **theirs) == ["", ""]
    lost = both(tmp_path, text + "metrics: {curves: none}\n", **theirs)
    assert all("the key metrics under slime_ext, got it beside slime_ext" in line for line in lost)


IN_THE_FILE = {"kl_coef: 0.1": 1, "get_mismatch_metrics: true": 0, "my_own: 3": 0, "save_interval: 5": 1}


@pytest.mark.parametrize(("line", "is_named"), IN_THE_FILE.items())
def test_flags_of_slimes_own_in_the_file_are_warned_of_once(tmp_path, caplog, line, is_named):
    both(tmp_path, f"slime_ext: {{preset: token_tis}}\n{line}\n")
    name = line.partition(":")[0]
    said = f"--custom-config-path: expected slime's flags on the command line, got {name} in the file: "
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True] * is_named

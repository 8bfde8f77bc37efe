"""What ``slime_ext.host.init`` refuses, warns of and says; every line names the flag and what to do."""

from __future__ import annotations

import logging
from argparse import Namespace

import pytest
import yaml

from slime_ext import host
from slime_ext.errors import ConfigError, warn_once
from slime_ext.host import hosts
from slime_ext.tools.commands.arguments import Arguments
from slime_ext.tools.commands.check import checked

TOKEN = "slime_ext.tis.token_tis"
PLAN = "slime_ext.host.rollout_data_postprocess"
PLANNED = {"steps": ["reweight", {"truncate": {"high": 2.0}}, "normalize"]}


def arguments(**more):
    return Namespace(**{"use_tis": True, "custom_tis_function_path": TOKEN, **more})


def refusal(**more):
    with pytest.raises(ConfigError) as caught:
        host.init(arguments(**more))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# fmt: off
BROKEN = [
    # the hook
    ({"use_rollout_logprobs": True}, "--use-rollout-logprobs: cannot be combined with --use-tis"),
    ({"use_tis": False}, "--use-tis: expected on beside --custom-tis-function-path"),
    ({"use_tis": False, "get_mismatch_metrics": True, "custom_tis_function_path": None},
     "--custom-tis-function-path: expected a function beside --get-mismatch-metrics"),
    # values as YAML has them
    ({"use_tis": "false"}, "--use-tis: expected true or false, got 'false'"),
    ({"custom_tis_function_path": "slime_ext.tis.vanilla_tis_function", "tis_clip": "2e0"},
     "--tis-clip: expected a number (YAML reads 1e-4 as text; write 1.0e-4), got '2e0'"),
    ({"eps_clip": float("nan")}, "--eps-clip: expected a number"),
    ({"num_steps_per_rollout": "1"}, "--num-steps-per-rollout: expected a whole number above 0, got '1'"),
    ({"rollout_data_postprocess_path": 5}, "--rollout-data-postprocess-path: expected package.module.func"),
    ({"custom_tis_function_path": "slime_ext.tis.icepop_function", "tis_clip": 1.0, "tis_clip_low": 2.0},
     "--tis-clip: expected more than --tis-clip-low 2.0, got 1.0"),
    ({"custom_tis_function_path": "slime_ext.tis.vanilla_tis_function", "tis_clip": 1e40},
     "--tis-clip: expected 0, or a number of size 1.18e-38 to 3.4e+38 (float32), got 1e+40"),
    ({"custom_tis_function_path": "slime_ext.tis.correct", "slime_ext": {"surrogate": "dual_clip"},
      "eps_clip": -0.2}, "--eps-clip: expected a number >= 0, got -0.2"),
    ({"loss_type": "sft_loss"}, "--loss-type: expected policy_loss beside --custom-tis-function-path, got"),
    # the functions
    ({"custom_tis_function_path": "slime_ext.tis.tokn_tis"}, "did you mean 'token_tis'"),
    ({"custom_tis_function_path": "mis.py:compute"}, "expected package.module.function"),
    ({"custom_tis_function_path": f"{__name__}.takes_too_little"}, "--custom-tis-function-path"),
    ({"custom_megatron_before_train_step_hook_path": f"{__name__}.takes_too_little"},
     "expected a function of args, rollout_id, step_id, model"),
    ({"custom_convert_samples_to_train_data_path": "no.such.module"}, "expected a module that imports"),
    # the configuration
    ({"slime_ext": {"steps": ["truncat"]}}, "did you mean 'truncate'"),
    ({"slime_ext": {}, "custom_tis_function_path": f"{__name__}.takes_everything"}, "would read that key"),
    ({"slime_ext": {"surrogate": "reinforce"}, "use_opsm": True}, "--use-opsm: expected off"),
    # what couples samples
    ({"custom_tis_function_path": "slime_ext.tis.correct", "slime_ext": PLANNED},
     f"--rollout-data-postprocess-path: expected {PLAN}"),
    # slime's own, which a key of --custom-config-path goes around
    ({"rollout_temperature": 0.0}, "--rollout-temperature: expected a number above 0, got 0.0:"),
    ({"kl_coef": 0.1, "kl_loss_coef": 0.1}, "--kl-coef: expected 0 beside --kl-loss-coef, got 0.1"),
    ({"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": False}, "--normalize-advantages"),
    ({"advantage_estimator": "ppo", "use_critic": False}, "--advantage-estimator: expected another than ppo"),
    ({"n_samples_per_prompt": 1, "grpo_std_normalization": True}, "--disable-grpo-std-normalization"),
    ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": None}, "--max-tokens-per-gpu: expected a number"),
    ({"balance_by_flops": True}, "--balance-by-flops: expected --use-dynamic-batch-size"),
    ({"num_steps_per_rollout": 4, "rollout_batch_size": 8, "n_samples_per_prompt": 8, "global_batch_size": 9},
     "--global-batch-size: expected --rollout-batch-size 8 x --n-samples-per-prompt 8"),
    ({"over_sampling_batch_size": 4, "rollout_batch_size": 8}, "--over-sampling-batch-size: expected"),
    ({"save_debug_train_data": "a", "save_debug_rollout_data": "a"}, "--save-debug-train-data: expected"),
    ({"dump_details": "a", "save_debug_rollout_data": None}, "--dump-details: expected the paths"),
    ({"debug_rollout_only": True, "debug_train_only": True}, "--debug-train-only: expected off"),
    ({"save_interval": 5, "save": None}, "--save: expected a folder"),
    ({"eval_interval": 5, "eval_datasets": []}, "--eval-prompt-data: expected prompts"),
    ({"enable_mtp_training": True, "mtp_num_layers": None}, "--mtp-num-layers: expected a number"),
    ({"use_rollout_routing_replay": True, "use_routing_replay": False}, "--use-routing-replay: expected on"),
    ({"use_opd": True, "opd_type": None}, "--opd-type: expected sglang or megatron"),
    ({"use_opd": False, "opd_teacher_load": "a"}, "--use-opd: expected on"),
]
# fmt: on


def takes_too_little(args):
    """A function that no hook's call fits."""


def takes_everything(*args, **kwargs):
    """A function that every call fits."""


def test_one_line_that_names_what_is_wrong():
    for more, line in BROKEN:
        assert line in refusal(**more)


@pytest.mark.parametrize(
    "more",
    [
        {"use_opd": False, "opd_teacher_load": "a", "use_critic": True},  # the critic's own arguments
        {"n_samples_per_prompt": 1, "grpo_std_normalization": True, "multi_lora": True},
    ],
)
def test_what_hosts_themselves_hand_over_is_let_through(more, capsys):
    host.init(arguments(**more))
    assert capsys.readouterr().out.count("\n") == 1


def test_no_upper_bound_is_a_number(capsys):
    vanilla = "slime_ext.tis.vanilla_tis_function"
    host.init(arguments(custom_tis_function_path=vanilla, tis_clip=float("inf"), eps_clip_high=float("inf")))
    assert "clip(proximal / behavior, --tis-clip-low, inf)" in capsys.readouterr().out


def test_arguments_that_a_host_does_not_have_are_not_missed(capsys):
    host.init(arguments())
    assert capsys.readouterr().out.count("\n") == 1


def test_one_line_says_what_runs_with_which_numbers(capsys):
    for more, said in (
        ({}, "token_tis: proximal / behavior, loss host, reweight(token) > truncate(high 2), masks policy"),
        (
            {"use_tis": False, "get_mismatch_metrics": True},
            "metrics only, the loss stays as it is: token_tis",
        ),
        ({"use_tis": False, "custom_tis_function_path": None}, "no correction (--use-tis is off)"),
        ({"custom_tis_function_path": None}, "the correction is the host's own, not one of slime_ext"),
        (
            {"custom_tis_function_path": f"{__name__}.takes_everything"},
            "takes_everything, not one of slime_ext",
        ),
        (
            {
                "custom_tis_function_path": "slime_ext.tis.off_policy_is_function",
                "eps_clip": 0.2,
                "eps_clip_high": 0.28,
            },
            "off_policy_is_function: weight clip(target / behavior, 1 - 0.2, 1 + 0.28) per token",
        ),
        (
            {
                "custom_tis_function_path": "slime_ext.tis.vanilla_tis_function",
                "tis_clip": 2.0,
                "tis_clip_low": 0,
            },
            "vanilla_tis_function: weight clip(proximal / behavior, 0, 2) per token",
        ),
    ):
        host.init(arguments(**more))
        out = capsys.readouterr().out
        assert out.startswith("slime_ext: ") and said in out and out.count("\n") == 1


def test_a_reducer_of_the_users_own_and_a_correction_that_is_off_are_named(caplog, capsys):
    more = {"custom_pg_loss_reducer_function_path": f"{__name__}.takes_everything"}
    with caplog.at_level(logging.WARNING):
        host.init(arguments(custom_tis_function_path="slime_ext.tis.geo_rs", **more))
        host.init(arguments(use_tis=False, get_mismatch_metrics=True))
        host.init(arguments(custom_tis_function_path="slime_ext.tis.metrics_only"))
        host.init(arguments(release_train=True, indep_dp=True))
        host.init(arguments(check_for_nan_in_loss_and_grad=False))
    reducer, off, idle, released, replicas, skipping = caplog.messages
    assert skipping.startswith("--no-check-for-nan-in-loss-and-grad: expected a run that may end")
    assert released.startswith("--release-train: expected a trainer that stays beside slime_ext.guards")
    assert replicas.startswith("--ft-components: expected data parallel ranks of one group, got independent")
    assert idle.startswith("slime_ext.steps: expected one beside --use-tis, got none")
    assert reducer.startswith("--custom-pg-loss-reducer-function-path") and off.startswith("--use-tis")


def slime(**facts):
    """slime as this process's host, with the given properties."""

    class Slime(hosts.Host):
        def loss_module(self):
            return type("loss", (), {"policy_loss_function": print, "get_log_probs_and_entropy": print})

    for name in ("passes_target", "hands_out_data", "may_skip_proximal"):
        setattr(Slime, name, facts.get(name, False))
    return Slime("slime", (), "", ("slime.loss",), "", "")


PLANNING = {
    "custom_tis_function_path": "slime_ext.tis.correct",
    "slime_ext": PLANNED,
    "rollout_data_postprocess_path": PLAN,
}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"hands_out_data": False}, "slime: expected a release whose --rollout-data-postprocess-path sees"),
        ({"hands_out_data": True, "may_skip_proximal": True}, "--get-mismatch-metrics: expected on"),
    ],
)
def test_a_release_that_cannot_give_the_step_plan_what_it_needs(monkeypatch, facts, line):
    monkeypatch.setattr(hosts, "current", lambda: slime(**facts))
    assert line in refusal(**PLANNING, num_steps_per_rollout=1)


@pytest.mark.parametrize("more", [{"num_steps_per_rollout": 2}, {"get_mismatch_metrics": True}])
def test_a_rollout_whose_proximal_log_probs_are_computed(monkeypatch, capsys, more):
    monkeypatch.setattr(hosts, "current", lambda: slime(hands_out_data=True, may_skip_proximal=True))
    host.init(arguments(**PLANNING, **more))
    assert "slime" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("passes", "said"),
    [(True, "passes cur_log_probs itself"), (False, "init passes cur_log_probs and advantages to the hook")],
)
def test_it_says_how_the_target_arrives(monkeypatch, capsys, passes, said):
    monkeypatch.setattr(hosts, "current", lambda: slime(passes_target=passes))
    host.init(arguments())
    assert said in capsys.readouterr().out


def test_a_hook_that_a_patched_host_would_break_is_refused(monkeypatch):
    monkeypatch.setattr(hosts, "current", lambda: slime(passes_target=True))
    line = refusal(custom_tis_function_path=f"{__name__}.for_a_stock_host")
    assert line.endswith("add **kwargs to it")


def for_a_stock_host(
    args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths
):
    """A third party's hook, written for slime as it is."""


def test_the_names_that_flags_give_are_there():
    assert {"init", "rollout_data_postprocess", "log_rollout"} <= set(dir(host))
    with pytest.raises(AttributeError, match="has no attribute 'inti'; did you mean 'init'"):
        host.inti  # noqa: B018


@pytest.mark.parametrize(("sees_data", "accepted"), [(False, True), (True, False)])
def test_a_postprocess_is_held_against_the_call_of_this_release(monkeypatch, capsys, sees_data, accepted):
    monkeypatch.setattr(hosts, "current", lambda: slime(hands_out_data=sees_data))
    more = {"rollout_data_postprocess_path": f"{__name__}.takes_too_little"}
    if accepted:
        host.init(arguments(**more))
    else:
        assert "expected a function of args, rollout_id, rollout_data" in refusal(**more)


SIZES = {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "global_batch_size": 32}


def test_the_number_of_steps_follows_from_the_batch_sizes():
    mapping = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
    line = refusal(custom_tis_function_path="slime_ext.tis.correct", slime_ext=mapping, **SIZES)
    assert "with 2 optimizer steps per rollout, got target" in line
    host.init(
        arguments(
            custom_tis_function_path="slime_ext.tis.correct",
            slime_ext=mapping,
            use_dynamic_global_batch_size=True,
            **SIZES,
        )
    )


@pytest.mark.parametrize(("more", "said"), [(SIZES, True), (SIZES | {"global_batch_size": 64}, False)])
def test_the_seeds_function_warns_before_it_counts_twice(caplog, capsys, more, said):
    warn_once.cache_clear()
    seed = "slime_ext.tis.off_policy_is_function"
    host.init(arguments(custom_tis_function_path=seed, eps_clip=0.2, eps_clip_high=0.2, **more))
    assert ("counted twice" in caplog.text) is said


def both(tmp_path, text, **more):
    """What ``check`` and ``init`` say of a file and the flags beside it; "" where they let it pass."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    flags = {"use_tis": True, "custom_tis_function_path": "slime_ext.tis.correct", **more}
    args = Arguments({**flags, **yaml.safe_load(text)}, set())
    said = []
    for call in (
        lambda: checked(args),
        lambda: host.init(Namespace(custom_config_path=str(path), **args.values)),
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
    "preset: token_is": "the key preset under slime_ext,",
    "verl: {rollout_is: token}": "the key verl under slime_ext,",
    "truncate: {high: 2.0}": "the key truncate in a step's place under slime_ext.steps,",
    "high: 3.0": "the key high as a field of a step under slime_ext.steps,",
    "ppo_clip: {anchor: behavior}": "the key ppo_clip under slime_ext.surrogate,",
    "tau_pos: 2.0": "the key tau_pos as a field under slime_ext.surrogate,",
    "action: stop": "the key action as a field of a metric under slime_ext.guards,",
    "ess_weight: {min: 0.1}": "the key ess_weight under slime_ext.guards,",
    "curves: none": "the key curves under slime_ext.metrics,",
    "bypass_mode: true": "the key bypass_mode under slime_ext.verl,",
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
    assert both(tmp_path, f"slime_ext: {{preset: token_is}}\n{line}\n") == ["", ""]


def test_a_file_that_another_function_reads_is_none_of_ours(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("level: token\nhigh: 3")
    host.init(
        arguments(custom_tis_function_path=f"{__name__}.takes_everything", custom_config_path=str(path))
    )
    host.init(arguments(custom_config_path=str(tmp_path / "on another machine.yaml")))


@pytest.mark.parametrize(
    ("function", "flags", "said"),
    [
        ("token_is", {"tis_clip": 5.0}, "--tis-clip: expected none beside slime_ext.tis.token_is, got 5"),
        (
            "correct",
            {"tis_clip_low": 0.5},
            "--tis-clip-low: expected none beside slime_ext.tis.correct, got 0.5",
        ),
        ("off_policy_is_function", {"tis_clip": 5.0}, "--tis-clip: expected none"),
        ("token_is", {"tis_clip": 2.0}, ""),
        ("vanilla_tis_function", {"tis_clip": 5.0}, ""),
    ],
)
def test_a_clip_that_the_function_does_not_read_is_named(caplog, capsys, function, flags, said):
    mapping = {"slime_ext": {"preset": "token_is"}} if function == "correct" else {}
    args = arguments(custom_tis_function_path=f"slime_ext.tis.{function}", **mapping, **flags)
    host.init(args)
    notes = checked(Arguments(dict(vars(args)), set())).notes
    for lines in ([record.getMessage() for record in caplog.records], notes):
        assert [line.startswith(said) for line in lines if line.startswith("--tis-clip")] == [True] * bool(
            said
        )


def test_check_says_what_an_init_of_the_users_own_leaves_out():
    own = {"custom_megatron_init_path": "my.init"}
    for more, noted in (
        (own, True),
        ({"custom_megatron_init_path": "slime_ext.host.init"}, False),
        ({}, False),
    ):
        notes = checked(Arguments(dict(vars(arguments(**more))), set())).notes
        assert any("my.init is run in place of slime_ext.host.init" in note for note in notes) is noted

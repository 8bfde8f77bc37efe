"""``convert`` inside other systems' whole configurations: the block is found, or its absence is said."""

from __future__ import annotations

import pytest
import yaml

from tests.tools.commands.test_commands import run, written

FLAT = {"rollout_is": True, "rollout_is_threshold": 2.0}
# What stands beside the keys that are read, as these systems ship it.
VERL = ("adv_estimator gamma lam norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl use_pf_ppo "
        "pf_ppo").split()  # fmt: skip
SKYRL = ("advantage_estimator kl_ctrl kl_estimator_type use_kl_estimator_k3 use_abs_kl use_kl_in_reward "
         "use_kl_loss kl_loss_coef use_entropy_loss entropy_loss_coef advantage_batch_normalize "
         "value_head_prefix policy_loss_type loss_reduction grpo_norm_by_std zero_variance_filter lambd "
         "gamma eps_clip_low eps_clip_high clip_ratio_c value_clip dynamic_sampling clip_cov kl_cov cispo "
         "sapo temperature max_seq_len").split()  # fmt: skip


def convert(capsys, tmp_path, system, whole):
    return run(capsys, "convert", "--from", system, written(tmp_path / "c.yaml", whole))


@pytest.mark.parametrize(
    ("system", "whole", "line"),
    [
        (
            "skyrl",
            {"trainer": {"algorithm": {"off_policy_correctoin": {}, "use_tis": False}}},
            "convert.trainer.algorithm: expected off_policy_correction, got off_policy_correctoin",
        ),
        (
            "verl",
            {"algorithm": {**FLAT, "rollout_is_levle": "sequence"}},
            "convert.algorithm: expected rollout_is_level, got rollout_is_levle: verl does not know it",
        ),
        (
            "verl",
            {"algorithm": {"rollout_corection": {"rollout_is": "token"}}},
            "convert.algorithm: expected rollout_correction, got rollout_corection",
        ),
        (
            "verl",
            {"algorithm": {**FLAT, "rollout_correction": None}},
            "convert.algorithm.rollout_is: expected it without rollout_correction beside it, got both",
        ),
        ("verl", {**FLAT, "rollout_correction": {}}, "convert.rollout_is: expected it without"),
        ("verl", {"algorithm": {"gamma": 1}}, "convert.verl: expected algorithm.rollout_correction, got"),
        (
            "verl",
            {"trainer": {"algorithm": {"off_policy_correction": {"tis_ratio_type": "token"}}}},
            "got none: it is a block of skyrl; use --from skyrl",
        ),
        ("verl", {"cap": 5.0}, "got none: it is a block of fireworks; use --from fireworks"),
        ("skyrl", {"trainer": {"lr": 1}}, "expected trainer.algorithm.off_policy_correction, got none"),
        ("fireworks", {"algorithm": {}}, "convert.fireworks: expected the keys of fireworks (cap, level, "),
        ("verl", {"rollout_si": "token"}, "a known key, got 'rollout_si'; did you mean 'rollout_rs'?"),
    ],
)  # fmt: skip
def test_what_a_system_would_not_read_is_refused(capsys, tmp_path, system, whole, line):
    status, out, err = convert(capsys, tmp_path, system, whole)
    assert (status, out) == (2, "") and line in err


@pytest.mark.parametrize(
    ("system", "whole", "where"),
    [
        ("verl", {"algorithm": {**FLAT, **dict.fromkeys(VERL)}}, ": algorithm"),
        (
            "verl",
            {"algorithm": {"rollout_correction": {"rollout_is": "token"}, **dict.fromkeys(VERL)}},
            ": algorithm.rollout_correction",
        ),
        (
            "skyrl",
            {"trainer": {"algorithm": {"off_policy_correction": {"tis_ratio_type": "token"}, "use_tis": False,
                                       "tis_imp_ratio_cap": -1.0, **dict.fromkeys(SKYRL)}}},
            ": trainer.algorithm",
        ),
        ("verl", {"rollout_is": "token"}, ""),
    ],
    ids=["flat", "block", "skyrl", "alone"],
)  # fmt: skip
def test_the_block_is_found_among_a_systems_other_keys(capsys, tmp_path, system, whole, where):
    status, out, _ = convert(capsys, tmp_path, system, whole)
    assert status == 0 and out.startswith(f"# converted from {system}{where}\n")
    assert yaml.safe_load(out)["slime_ext"]["steps"][0] == {"reweight": {"level": "token"}}


def test_a_note_is_wrapped_between_words(capsys, tmp_path):
    block = {"use_tis": True, "tis_level": "token", "tis_mode": "clip", "tis_upper_bound": 2.0}
    _, out, _ = convert(capsys, tmp_path, "slime_mis", {**block, "tis_batch_normalize": True})
    assert "micro-batch" in out


@pytest.mark.parametrize(
    ("block", "flags"),
    [
        ({"eps_clip": 0.1234567}, ["# needs: --eps-clip 0.1234567", "# needs: --eps-clip-high 0.1234567"]),
        (
            {"eps_clip": 0.2, "eps_clip_high": 0.28},
            ["# needs: --eps-clip 0.2", "# needs: --eps-clip-high 0.28"],
        ),
        ({"eps_clip_high": 0.28}, ["# needs: --eps-clip-high 0.28"]),
        ({"tis_cap": 5.0}, []),
    ],
)
def test_the_clip_range_of_a_block_is_the_hosts(capsys, tmp_path, block, flags):
    _, out, _ = convert(capsys, tmp_path, "fireworks", block)
    assert [line for line in out.splitlines() if line.startswith("# needs")] == flags


CLIP = {"clip_ratio_c": 3.0, "loss_agg_mode": "token-mean", "lr": 1.0}
OF_A_LOSS = {
    "verl beside": ("verl", {"algorithm": {"rollout_correction": {"rollout_is": "token"}},
                             "actor_rollout_ref": {"actor": CLIP}}, ["clip_ratio_c", "loss_agg_mode"]),
    "openrlhf whole": ("openrlhf", {"algo": {"advantage": {"is_correction_level": "token", "gamma": 1.0}},
                                    "actor": {"dual_clip": 3.0, "eps_clip_low_high": [0.2, 0.3]}},
                       ["dual_clip", "eps_clip_low_high"]),
    "trl among": ("trl", {"vllm_importance_sampling_mode": "token_mask", "epsilon_high": 0.28, "delta": 4.0},
                  ["epsilon_high", "delta"]),
    "verl script": ("verl", "python3 -m verl.trainer.main_ppo algorithm.rollout_correction.rollout_is=token "
                            "actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.lr=1",
                    ["clip_ratio_high"]),
    "none": ("fireworks", {"eps_clip": 0.2}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_A_LOSS)
def test_keys_of_the_loss_are_named_and_not_converted(capsys, tmp_path, case):
    system, whole, keys = OF_A_LOSS[case]
    path = written(tmp_path / ("run.sh" if isinstance(whole, str) else "c.yaml"), whole)
    status, out, err = run(capsys, "convert", "--from", system, path)
    notes = [line for line in out.splitlines() if line.startswith("# note") and "loss, not its" in line]
    assert (status, err) == (0, "") and {note.split()[2].rstrip(":") for note in notes} == {*keys}

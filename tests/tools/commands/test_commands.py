"""``presets``, ``check`` and ``convert`` as a user meets them: text, exit codes, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime_ext import load_config
from slime_ext.config.dialects import DIALECTS
from slime_ext.tools.commands import cli
from tests.config.test_configs import FILES

SCRIPT = """
ARGS=(
   --eps-clip 0.2  # the clip range
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --global-batch-size 64
   #--keep-old-actor
   {more}
)
python3 train.py ${{ARGS[@]}}
"""
EXAMPLE = Path(__file__).parents[3] / "examples/run_slime_multinode.sh"
GOOD = "--use-tis --custom-tis-function-path slime_ext.tis.token_tis"

CORRECT = GOOD.replace("token_tis", "correct")
SEED = "--use-tis --custom-tis-function-path slime_ext.tis.vanilla_tis_function"


def run(capsys, *words):
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def written(path, text):
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


def test_every_file_of_configs_passes(capsys):
    for path in FILES:
        status, out, err = run(capsys, "check", path)
        assert (status, err) == (0, "") and out.rstrip().endswith("ok"), path


REFUSED = [
    (GOOD.replace("token_tis", "token_tsi"), "did you mean 'token_tis'?"),
    (GOOD.replace("token_tis", "correct"), "slime_ext: expected a mapping in --custom-config-path"),
    (GOOD.removeprefix("--use-tis"), "--use-tis: expected on beside --custom-tis-function-path"),
    (f"{GOOD} --use-rollout-logprobs", "--use-rollout-logprobs: cannot be combined"),
    (f"{GOOD.replace('token_tis', 'cispo')} --use-opsm", "--use-opsm: expected off"),
    (f"{GOOD} --custom-config-path geo.yaml", "slime_ext.preset: expected token_tis (which --custom-tis"),
    (
        f"{GOOD} --custom-config-path verl.yaml",
        "--custom-tis-function-path: expected slime_ext.tis.correct beside slime_ext.verl, got",
    ),
    (f"{SEED} --custom-config-path geo.yaml", "nothing would read that key"),
    (f"{GOOD} --custom-config-path list.yaml", "slime_ext: expected a mapping, got [1]"),
    (f"{GOOD} --eps-clip-high much", "--eps-clip-high: expected a number, got 'much'"),
    # what only the whole of the flags shows, and what the host itself refuses
    (f"{GOOD} --use-score-centering", "--use-score-centering: expected the host's own vanilla_tis_function"),
    (
        "--use-score-centering --get-mismatch-metrics --custom-tis-function-path slime_ext.tis.metrics_only",
        "--get-mismatch-metrics: expected off beside --use-score-centering, got on: the host refuses it",
    ),
    (
        f"{GOOD.replace('token_tis', 'glm5')} --use-rollout-logprobs",
        "--use-rollout-logprobs: cannot be combined with --use-tis: the host refuses both",
    ),
    (f"{GOOD} --loss-type sft_loss", "--loss-type: expected policy_loss beside --custom-tis-function-path"),
    (f"{GOOD} --rollout-temperature 0", "--rollout-temperature: expected a number above 0, got 0.0"),
    (f"{GOOD} --custom-config-path whole.yaml", "slime_ext.preset: expected token_tis"),
    (
        f"{CORRECT} --num-steps-per-rollout 1 --custom-config-path whole.yaml",
        "--get-mismatch-metrics: expecte",
    ),
    (f"{CORRECT} --custom-config-path group.yaml --normalize-advantages", "slime_ext.group: expected ignore"),
    # names that slime would pass over
    (GOOD.replace("tis-function", "tis-funtion"), "expected --custom-tis-function-path, got --custom-tis-f"),
    (f"{GOOD} --custom-megatron-init-pth slime_ext.host.init", "expected --custom-megatron-init-path"),
    (GOOD.replace("--use-tis", "--use-tsi"), "expected --use-tis, got --use-tsi"),
    (
        f"{GOOD} --custom-config-path misspelt.yaml",
        "expected custom_tis_function_path, got custom_tis_fu",
    ),
    # functions of ours that are none, or another flag's
    (f"{GOOD} --custom-megatron-init-path slime_ext.host.initt", "did you mean 'slime_ext.host.init'"),
    (
        f"{GOOD} --rollout-data-postprocess-path slime_ext.host.init",
        "--rollout-data-postprocess-path: expected slime_ext.host.rollout_data_postprocess of slime_ext",
    ),
    # a mapping that slime would hand to nobody
    ("--use-tis --custom-config-path geo.yaml", "got none: nothing would read that key"),
    # values that are not what they look like
    (f"{GOOD} --custom-config-path text.yaml", "--use-tis: expected true or false, got 'false'"),
    (f"{SEED} --custom-config-path clip.yaml", "--tis-clip-low: expected a number (YAML reads 1e-4 as"),
    (f"{SEED} --tis-clip nan", "--tis-clip: expected a number"),
    (f"{SEED} --tis-clip-low 3 --tis-clip 2", "--tis-clip: expected more than --tis-clip-low 3.0, got"),
]


def test_a_launch_script_is_checked_as_a_whole(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "geo": {"slime_ext": {"preset": "geo_rs"}},
        "verl": {"slime_ext": {"verl": {"rollout_is": "token"}}},
        "whole": {"slime_ext": {"preset": "m2"}},
        "group": {"get_mismatch_metrics": True, "slime_ext": {"preset": "geo_rs", "group": "rebaseline"}},
        "misspelt": {"custom_tis_functon_path": "slime_ext.tis.correct"},
        "text": {"use_tis": "false"},
        "clip": "tis_clip_low: 1e-3",
        "list": {"slime_ext": [1]},
    }.items():  # fmt: skip
        written(tmp_path / f"{name}.yaml", content)
    for more, line in REFUSED:
        status, _, err = run(capsys, "check", written(tmp_path / "run.sh", SCRIPT.format(more=more)))
        assert status == 1 and line in err, (more, err)


def test_what_only_a_shell_knows_is_not_judged(capsys, tmp_path):
    more = f"{GOOD} --rollout-temperature $MAX --loss-type $LOSS --kl-coef $A"
    status, out, err = run(capsys, "check", written(tmp_path / "run.sh", SCRIPT.format(more=more)))
    assert (status, err) == (0, "") and "ok" not in out.split()
    for flag in ("--rollout-temperature $MAX", "--loss-type $LOSS", "--kl-coef $A"):
        assert f"{flag}: known only where the script runs" in out


def test_a_launch_without_ours_gets_the_flags_to_paste(capsys, tmp_path):
    launch = written(tmp_path / "run.sh", SCRIPT.format(more=""))
    status, out, _ = run(capsys, "check", launch)
    assert status == 0 and "not used by this launch" in out and not out.rstrip().endswith("ok")
    pasted = [line.removeprefix("first").removeprefix("then").strip() for line in out.splitlines()]
    init = "--custom-megatron-init-path slime_ext.host.init"
    begin, then = pasted.index(init), pasted.index("--use-tis")
    assert pasted[then + 1 : then + 3] == ["--custom-tis-function-path slime_ext.tis.token_tis", init]
    for more in (pasted[begin], " ".join(pasted[then : then + 3])):
        status, said, _ = run(capsys, "check", written(tmp_path / "run.sh", SCRIPT.format(more=more)))
        assert status == 0 and said.rstrip().endswith("ok") and "note" not in said
    own = "--use-tis --custom-tis-function-path examples.mis.weights"
    _, out, _ = run(capsys, "check", written(tmp_path / "run.sh", f"python3 train.py {own}"))
    assert "in place of examples.mis.weights" in out
    _, out, _ = run(capsys, "check", written(tmp_path / "run.sh", "python3 train.py --loss-type sft_loss"))
    assert "note" in out and "--loss-type: expected policy_loss" in out and "--use-tis" not in out


def test_a_file_that_is_none_is_one_line(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    for content, line in {
        b"": "expected a mapping, got NoneType",
        b"\x00": "expected YAML, got an error at it: special characters are not allowed",
        b"\xff": "expected text in UTF-8, got invalid start byte at 0",
        b"a: [": "expected YAML, got an error at line 1",
        b"1: 2": "expected names as keys, got 1",
        b"slime_ext: {guards: {1: {min: 0}}}": "slime_ext.guards: expected a known metric, got '1'",
        b"lr: 1": "expected the key slime_ext, got none",
        b'slime_ext: {preset: "a\\x1b[31m\\nb"}': "got 'a\\x1b[31m\\nb'",
    }.items():
        path.write_bytes(content)
        status, _, err = run(capsys, "check", path)
        assert status == 1 and line in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "formula", "noted"),
    [
        ("", "reweight(token) > clip(low 0, high 2)", False),
        ("--tis-clip-low 0.5 --tis-clip 3", "reweight(token) > clip(low 0.5, high 3)", False),
        ("--tis-clip $(cat cap)", "clip(low 0, high 2) with the defaults of --tis-clip", False),
        ("--eps-clip 0.1", "reweight(token) > clip(low 0.9, high 1.1)", True),
    ],
)
def test_a_function_with_a_formula_of_its_own_shows_it(capsys, tmp_path, more, formula, noted):
    line = SEED.replace("vanilla_tis", "off_policy_is") if noted else SEED
    status, out, _ = run(capsys, "check", written(tmp_path / "run.sh", f"train.py {line} {more}"))
    assert status == 0 and formula in out
    assert ("needs cur_log_probs: in slime add --custom-megatron-init-path" in out) is noted


def test_variables_of_a_script_are_followed(capsys, tmp_path, monkeypatch):
    written(tmp_path / "c.yaml", {"use_tis": True, "slime_ext": {"fireworks": {"eps_clip": 0.3}}})
    monkeypatch.setenv("CLIP", "0.2")
    text = """
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
NAME=${NAME:-c}
ARGS=(
      --custom-config-path ${HERE}/$NAME.yaml --eps-clip ${CLIP} --tis-clip ${UNKNOWN}
      --custom-tis-function-path slime_ext.tis.correct)
python3 train.py ${ARGS[@]}
"""
    status, _, err = run(capsys, "check", written(tmp_path / "run.sh", text))
    assert status == 1 and "fireworks.eps_clip: expected 0.2" in err


def test_a_preset_has_its_other_name_too(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "c.yaml", {"slime_ext": {"preset": "token_is", "mask_scope": "all"}})
    path = written(tmp_path / "run.sh", f"train.py {GOOD} --custom-config-path c.yaml")
    assert run(capsys, "check", path)[0] == 0


def test_a_file_alone_is_told_what_it_lacks(capsys, tmp_path):
    _, out, _ = run(capsys, "check", written(tmp_path / "c.yaml", {"slime_ext": {"preset": "geo_rs"}}))
    assert "slime needs custom_tis_function_path: slime_ext.tis.correct" in out
    idle = {"use_tis": True, "slime_ext": {"skyrl": {}}}
    _, out, _ = run(capsys, "check", written(tmp_path / "c.yaml", idle))
    assert "expected one beside --use-tis, got none: the loss stays as it is" in out
    _, out, _ = run(capsys, "check", written(tmp_path / "run.sh", f"train.py {GOOD}"))
    assert "no metrics: in slime add --custom-megatron-init-path slime_ext.host.init" in out


def test_the_launch_script_of_the_examples_passes(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_DIR", str(tmp_path))
    status, out, err = run(capsys, "check", EXAMPLE)
    assert (status, err) == (0, "") and "veto(low 0.0001)" in out
    assert "qwen3-32B.sh is not here" in out and not out.rstrip().endswith("ok")  # it sets the model's flags
    (tmp_path / "scripts/models").mkdir(parents=True)
    written(tmp_path / "scripts/models/qwen3-32B.sh", "MODEL_ARGS=(--num-layers 64)")
    assert run(capsys, "check", EXAMPLE)[1].rstrip().endswith("ok")


def test_the_launch_script_of_the_examples_is_slimes_but_for_one_flag():
    lines = [line.split("#")[0] for line in EXAMPLE.read_text().splitlines()]
    flags = [
        word for line in lines for word in line.split() if word.startswith("--custom") or "slime_ext" in word
    ]
    assert flags == ["--custom-config-path", "slime_ext"]  # the latter names the TensorBoard folder
    assert subprocess.run(["bash", "-n", str(EXAMPLE)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("more", "noted"), [("", True), ("--custom-megatron-init-path slime_ext.host.init", False)]
)
def test_what_needs_the_target_is_told_how_it_gets_there(capsys, tmp_path, more, noted):
    flags = f"train.py --use-tis --custom-tis-function-path slime_ext.tis.off_policy_is {more}"
    _, out, _ = run(capsys, "check", written(tmp_path / "run.sh", flags))
    assert ("add --custom-megatron-init-path" in out) is noted


def test_arguments_of_another_file_count(capsys, tmp_path):
    mapping = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
    named = {"use_tis": True, "custom_tis_function_path": "slime_ext.tis.correct", "slime_ext": mapping}
    path = written(tmp_path / "c.yaml", named)
    assert run(capsys, "check", path)[0] == 0
    script = written(tmp_path / "run.sh", SCRIPT.format(more=""))  # 256 samples in steps of 64
    status, _, err = run(capsys, "check", path, "--args", script)
    assert status == 1 and "4 optimizer steps per rollout" in err


def test_another_systems_file_is_sent_to_convert(capsys, tmp_path):
    path = written(tmp_path / "mis.yaml", {"use_tis": True, "tis_level": "token", "tis_mode": "mask"})
    status, _, err = run(capsys, "check", path)
    assert status == 1 and "slime-ext convert --from slime_mis" in err


BLOCKS = {
    "verl": {"algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_rs": "token_k1",
                                                  "rollout_rs_threshold": "0.5_1.5"}}},
    "skyrl": {"trainer": {"algorithm": {"off_policy_correction": {"tis_ratio_type": "sequence"}, "lr": 1}}},
    "fireworks": {"cap": 5.0, "level": "sequence"},
    "slime_mis": {"use_tis": True, "use_rs": False, "tis_level": "token", "tis_mode": "clip",
                  "tis_upper_bound": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("system", DIALECTS)
def test_what_convert_prints_is_what_the_block_means(capsys, tmp_path, system):
    status, out, _ = run(capsys, "convert", "--from", system, written(tmp_path / "c.yaml", BLOCKS[system]))
    native = yaml.safe_load(out)
    block = BLOCKS[system]
    block = block.get("algorithm", block).get("rollout_correction", block)
    block = block["trainer"]["algorithm"]["off_policy_correction"] if system == "skyrl" else block
    assert status == 0 and native["custom_tis_function_path"] == "slime_ext.tis.correct"
    assert load_config(native["slime_ext"]) == load_config({system: block})


def test_a_block_that_is_null_converts_to_no_correction(capsys, tmp_path):
    whole = {"algorithm": {"rollout_correction": None, "gamma": 1.0}}
    status, out, _ = run(capsys, "convert", "--from", "verl", written(tmp_path / "c.yaml", whole))
    assert status == 0 and yaml.safe_load(out)["slime_ext"]["steps"] == []


def test_what_converts_to_a_whole_step_brings_what_that_needs(capsys, tmp_path):
    block = written(tmp_path / "v.yaml", {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"})
    _, out, _ = run(capsys, "convert", "--from", "verl", block)
    native = yaml.safe_load(out)
    path = written(tmp_path / "native.yaml", native)
    checked = run(capsys, "check", path)[1]
    assert "denominator  kept" in checked and "note" not in checked
    needed = "--get-mismatch-metrics: expected on with a correction that couples"
    del native["get_mismatch_metrics"]
    assert needed in run(capsys, "check", written(path, native))[1]
    several = written(tmp_path / "run.sh", "train.py --num-steps-per-rollout 2")
    assert "--get-mismatch-metrics" not in run(capsys, "check", path, "--args", several)[1]


def test_what_converts_to_the_targets_numerator_brings_what_carries_it(capsys, tmp_path):
    block = written(tmp_path / "v.yaml", {"bypass_mode": True, "loss_type": "reinforce"})
    _, out, _ = run(capsys, "convert", "--from", "verl", block)
    assert yaml.safe_load(out)["custom_megatron_init_path"] == "slime_ext.host.init"
    assert "note" not in run(capsys, "check", written(tmp_path / "native.yaml", out))[1]


def test_convert_says_what_could_surprise(capsys, tmp_path):
    _, out, _ = run(capsys, "convert", "--from", "verl", written(tmp_path / "c.yaml", BLOCKS["verl"]))
    assert "# note: rollout_rs token_k1: verl applies 0.5 .. 1.5 to rollout / train" in out


MISTAKES = [
    ["--hlep"],
    ["--fail-on", "temprature"],
    ["--config", "nope.yaml"],
    ["--config", FILES[0], "--rollouts", "x"],
]


@pytest.mark.parametrize(
    "words",
    [
        ["check", FILES[0]],
        ["presets"],
        ["presets", "geo_rs"],
        ["bench", "fidelity", "token_ti"],
        ["analyze", "--help"],
        ["analyze", ".", *MISTAKES[0]],
        *(pytest.param(["analyze", ".", *words], marks=pytest.mark.slow) for words in MISTAKES[1:]),
    ],
)
def test_no_command_imports_torch_or_leaves_a_stand_in(words):
    code = (
        "import contextlib, sys; from slime_ext.tools.commands import cli\n"
        f"with contextlib.suppress(SystemExit): cli.main({[str(w) for w in words]!r})\n"
        "print([n for n in sys.modules if n.split('.')[0] == 'torch' or n == 'slime_ext.config.load'])"
    )
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout.splitlines()[-1] == "[]"

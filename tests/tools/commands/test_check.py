"""What ``check`` says of a launch script and of a file: golden/check.txt."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import DECISIVE
from slime_ext.tools import decision
from tests.config.test_configs import FILES
from tests.golden import pairs
from tests.host import trees
from tests.tools.commands.in_process import run, written

pytestmark = pytest.mark.usefixtures("in_process")
EXAMPLE = Path(__file__).parents[3] / "examples/run_slime_multinode.sh"
GOOD = "--use-tis --custom-tis-function-path slime_ext.tis.token_tis"
USUAL = ("file ", "function ", "loss ", "masks ", "numerator proximal", "needs -")  # lines without news
SIZES = "--eps-clip 0.2 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64"
BESIDE = {
    "geo.yaml": "slime_ext: {preset: geo_rs}",
    "verl.yaml": "slime_ext: {verl: {rollout_is: token}}",
    "whole.yaml": "slime_ext: {preset: m2}",
    "group.yaml": "get_mismatch_metrics: true\nslime_ext: {preset: geo_rs, group: rebaseline}",
    "misspelt.yaml": "custom_tis_functon_path: slime_ext.tis.correct",
    "text.yaml": "use_tis: 'false'",
    "clip.yaml": "tis_clip_low: 1e-3",
    "list.yaml": "slime_ext: [1]",
    "mine.py": "def init(args): ...",
    "calls.py": "def loss(*args):\n    return host.policy_loss_function(*args)",
}


def test_what_is_said_of_a_launch_and_of_a_file_is_written_down(capsys, tmp_path, monkeypatch):
    """A line is a file's YAML, flags of a launch that has SIZES too, or a whole script (⏎ ends its lines)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")
    for name, text in BESIDE.items():
        written(tmp_path / name, text)

    def answer(line):
        name = "c.yaml" if line.startswith("{") else "run.sh"
        launch = f"python3 train.py {SIZES} {line}" if line.startswith("--") else line.replace("⏎", "\n")
        status, out, err = run(capsys, "check", written(tmp_path / name, launch))
        assert (status, bool(err)) in ((0, False), (1, True)) and (not err or out == "")
        lines = [" ".join(each.split()) for each in (err or out).replace(f"{tmp_path}/", "").splitlines()]
        return [each for each in lines if not each.startswith(USUAL)]

    assert len(pairs(Path(__file__).parent / "golden/check.txt", answer)) > 90


@pytest.mark.parametrize("flags", ["--loss-type sft_loss", "--use-rollout-logprobs"])
def test_a_launch_without_slime_ext_gets_no_warning_about_slime_ext(flags, capsys, tmp_path):
    """Rules that flags of ours would break say why ``check`` does not offer the flags. The launch is fine."""
    script = written(tmp_path / "run.sh", f"python3 train.py {SIZES} {flags}")
    status, out, err = run(capsys, "check", script, "--fail-on", "warning", "--json")
    (line,) = json.loads(out)["lines"]
    assert (status, err, line["rule"], line["severity"]) == (0, "", None, None)
    assert line["message"].startswith(flags.split()[0]) and "remove" not in line["message"]


def test_every_file_of_configs_passes(capsys):
    for path in FILES:
        status, out, err = run(capsys, "check", path)
        assert (status, err) == (0, "") and out.rstrip().endswith("ok"), path


def test_a_file_that_is_none_is_one_line(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    for content, line in {
        b"": "expected a mapping, got NoneType",
        b"\x00": "expected YAML, got an error: special characters are not allowed",
        b"\xff": "expected text in UTF-8, got invalid start byte at 0",
        b"a: [": "expected YAML, got an error at line 1",
        b'slime_ext: {preset: "a\\x1b[31m\\nb"}': "got 'a\\x1b[31m\\nb'",
    }.items():
        path.write_bytes(content)
        status, _, err = run(capsys, "check", path)
        assert status == 1 and line in err and err.count("\n") == 1


def test_variables_of_a_script_are_followed(capsys, tmp_path, monkeypatch):
    init = {"custom_megatron_init_path": "slime_ext.host.init"}
    written(tmp_path / "c.yaml", {"use_tis": True, **init, "slime_ext": {"surrogate": "ppo_clip"}})
    monkeypatch.setenv("FLOOR", "3.0")
    text = """
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
NAME=${NAME:-c}
ARGS=(
      --custom-config-path ${HERE}/$NAME.yaml --eps-clip-c ${FLOOR} --tis-clip ${UNKNOWN}
      --custom-tis-function-path slime_ext.tis.correct)
python3 train.py ${ARGS[@]}
"""
    path = written(tmp_path / "run.sh", text)
    status, out, _ = run(capsys, "check", path)
    assert status == 0 and "--eps-clip-c $FLOOR: known only where the script runs" in out
    assert "--env FLOOR to read it" in out and "--env UNKNOWN" not in out
    status, _, err = run(capsys, "check", path, "--env", "FLOOR")
    assert (
        status == 1 and "--eps-clip-c: expected none beside this surrogate of slime_ext, got ${FLOOR}" in err
    )
    monkeypatch.delenv("FLOOR")
    status, _, err = run(capsys, "check", path, "--env", "FLOOR")
    assert status == 1 and "--env: expected a variable that is set here, got FLOOR: export it first" in err


def test_a_preset_has_its_other_name_too(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "c.yaml", {"slime_ext": {"preset": "token_is", "mask_scope": "all"}})
    path = written(tmp_path / "run.sh", f"train.py {GOOD} --custom-config-path c.yaml")
    assert run(capsys, "check", path)[0] == 0


def test_the_launch_script_of_the_examples_passes(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "check", EXAMPLE, "--env", "SLIME_DIR")
    assert (status, err) == (0, "") and re.search(r"^steps +-", out, re.M)
    # It sets the model's flags, of which no rule reads any.
    assert "qwen3-32B.sh is not here; it is read as a model's arguments" in " ".join(out.split())
    assert out.endswith("ok\n")
    (tmp_path / "scripts/models").mkdir(parents=True)
    written(tmp_path / "scripts/models/qwen3-32B.sh", "MODEL_ARGS=(--num-layers 64)")
    out = run(capsys, "check", EXAMPLE, "--env", "SLIME_DIR")[1]
    assert "is not here" not in out and out.endswith("ok\n")


def test_the_launch_script_of_the_examples_is_slimes_but_for_one_flag():
    lines = [line.split("#")[0] for line in EXAMPLE.read_text().splitlines()]
    flags = [
        word for line in lines for word in line.split() if word.startswith("--custom") or "slime_ext" in word
    ]
    assert flags == ["--custom-config-path", "slime_ext"]  # the latter names the TensorBoard folder
    assert subprocess.run(["bash", "-n", str(EXAMPLE)], check=False).returncode == 0


def test_arguments_of_another_file_count(capsys, tmp_path):
    mapping = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
    named = {"use_tis": True, "custom_tis_function_path": "slime_ext.tis.correct", "slime_ext": mapping}
    path = written(tmp_path / "c.yaml", named)
    assert run(capsys, "check", path)[0] == 0
    script = written(tmp_path / "run.sh", f"python3 train.py {SIZES}")  # 256 samples in steps of 64
    status, _, err = run(capsys, "check", path, "--args", script)
    assert status == 1 and "4 optimizer steps per rollout" in err


def test_a_script_is_known_by_its_name_or_its_first_line(capsys, tmp_path):
    for name, text in {
        "run.slurm": "#!/bin/bash\n#SBATCH --nodes=4\ntrain.py {}",
        "run.sbatch": "train.py {}",
        "run.zsh": "train.py {}",
        "run.job": "#!/usr/bin/env bash\ntrain.py {}",
    }.items():
        status, out, err = run(capsys, "check", written(tmp_path / name, text.format(GOOD)))
        assert (status, err) == (0, "") and "truncate(high 2)" in out, name


def test_a_yaml_file_by_another_name_is_none(capsys, tmp_path):
    path = written(tmp_path / "c.conf", {"slime_ext": {"preset": "geo_rs"}})
    assert run(capsys, "check", path)[0] == 0


def test_flags_of_the_scripts_own_stand_behind_any_other(capsys, tmp_path):
    path = written(tmp_path / "run.sh", 'python3 train.py "$@"')
    keys = written(tmp_path / "c.yaml", {"use_tis": True})
    for first in ((path,), (keys, "--args", path), ("--args", path, keys)):
        assert "truncate(high 2)" in run(capsys, "check", *first, "--", *GOOD.split())[1]


def test_arguments_come_from_a_script_alone(capsys, tmp_path):
    path = written(tmp_path / "c.yaml", {"slime_ext": {"preset": "geo_rs"}})
    status, _, err = run(capsys, "check", path, "--args", path)
    assert status == 1 and "--args: expected a launch script, got" in err
    script = written(tmp_path / "run.sh", f"python3 train.py {GOOD}")
    status, _, err = run(capsys, "check", script, "--args", script)
    assert status == 1 and "--args: expected a YAML file before it, got the script" in err
    status, _, err = run(capsys, "check", path, "--", "--lr", "1")
    assert status == 1 and "expected no flags after -- with a YAML file, got --lr" in err


@pytest.mark.parametrize("flag", ["loss-type", "advantage-estimator", "train-backend", "pg-loss-type"])
def test_a_word_that_no_host_takes_is_refused_unless_the_checkout_takes_it(capsys, tmp_path, flag):
    path = written(tmp_path / "run.sh", f"python3 train.py \\\n  {GOOD} --{flag} foo")
    status, _, err = run(capsys, "check", path)
    assert status == 1 and re.search(rf"run\.sh:2: --{flag}: expected one of .*, got 'foo'$", err.strip())
    (tmp_path / "slime/utils").mkdir(parents=True)
    written(tmp_path / "train.py", "")
    written(tmp_path / "slime/utils/arguments.py", 'choices=["bar"]')
    assert run(capsys, "check", path)[0] == 1
    written(tmp_path / "slime/utils/arguments.py", 'choices=["foo", "bar"]')
    assert run(capsys, "check", path)[0] == 0


def test_a_second_file_is_refused(capsys, tmp_path):
    path = written(tmp_path / "run.sh", f"python3 train.py {GOOD}")
    with pytest.raises(SystemExit):
        run(capsys, "check", path, path)
    assert "unrecognized arguments" in capsys.readouterr().err


def test_a_file_named_by_a_script_is_the_one_where_the_script_runs(capsys, tmp_path, monkeypatch):
    """The folder of its ``cd``, else the host's checkout, else this command's; beside the script is none."""
    for folder in ("scripts/low", "slime", "other"):
        (tmp_path / folder).mkdir(parents=True)
    written(tmp_path / "scripts/low/c.yaml", {"slime_ext": {"preset": "token_tis"}})
    written(tmp_path / "other/c.yaml", {"slime_ext": {"preset": "geo_rs"}})
    flags = "--use-tis --custom-tis-function-path slime_ext.tis.correct --custom-config-path c.yaml"
    path = written(tmp_path / "scripts/low/run.sh", f"python3 train.py {flags}")
    status, _, err = run(capsys, "check", path)
    assert status == 1 and "expected a file where the script runs, got no c.yaml in" in err
    monkeypatch.chdir(tmp_path / "other")
    assert "veto(low 0.0001)" in run(capsys, "check", path)[1]
    written(tmp_path / "train.py", "")  # the checkout that the script lies in
    status, _, err = run(capsys, "check", path)
    assert status == 1 and f"got no c.yaml in {tmp_path}:" in err
    written(path, f"cd {tmp_path}/other\npython3 train.py {flags}")
    assert "veto(low 0.0001)" in run(capsys, "check", path)[1]


def test_a_warning_is_called_one_and_counted_in_the_last_line(capsys, tmp_path):
    script = written(
        tmp_path / "run.sh", f"python3 train.py {GOOD.removeprefix('--use-tis ')} --get-mismatch-metrics"
    )
    status, out, err = run(capsys, "check", script)
    assert (status, err) == (0, "") and "\nwarning" in out and out.endswith("\nok; 1 warning\n")
    status, out, err = run(capsys, "check", script, "--fail-on", "warning")
    assert (status, err) == (1, "") and out.endswith("\nfailed because of 1 warning (--fail-on warning)\n")
    status, out, err = run(capsys, "check", script, "--ignore", "correction_switched_off")
    assert (status, err) == (0, "") and "\nwarning" not in out and out.endswith("\nok\n")


@pytest.mark.parametrize(
    ("flag", "near"),
    [("--rollout-batchsize", "--rollout-batch-size"), ("--eps-clip-hihg", "--eps-clip-high")],
)
def test_a_misspelt_flag_of_the_host_is_named_where_its_checkout_is(capsys, tmp_path, flag, near):
    host = tmp_path / "host"
    package = host / "slime/utils"
    package.mkdir(parents=True)
    (host / "slime/backends").mkdir()
    written(host / "train.py", "")
    written(package / "arguments.py", f'parser.add_argument("{near}", type=int)\n')
    script = written(tmp_path / "run.sh", f"python3 train.py {flag} 8")
    said = " ".join(run(capsys, "check", script, "--host", host)[1].split())
    assert (
        f"{flag}: expected a flag of slime, got a name that it does not define; did you mean {near}?" in said
    )
    script = written(tmp_path / "run.sh", f"python3 train.py {near} 8 --lr 1 --no-{near[2:]}")
    assert "did you mean" not in run(capsys, "check", script, "--host", host)[1]


def test_a_file_that_lies_beside_our_package_alone_is_none_of_the_script(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--use-tis --custom-tis-function-path slime_ext.tis.correct"
    text = f"python3 train.py {flags} --custom-config-path configs/modes/stale.yaml"
    status, out, err = run(capsys, "check", written(tmp_path / "run.sh", text))
    assert (status, out) == (1, "") and f"got no configs/modes/stale.yaml in {tmp_path}" in err


PATCHED = f"{trees.TARGET}{trees.LOSS}\nTIS = {{'cur_log_probs': None, 'advantages': None}}\n"
NO_TARGET = "expected slime_ext.host.init beside slime_ext.tis.cispo, got none: set it, because the corre"
INIT = "--custom-megatron-init-path slime_ext.host.init"
LOG = "--custom-rollout-log-function-path slime_ext.host.log_rollout"
CISPO = "--use-tis --custom-tis-function-path slime_ext.tis.cispo"
ROOM, LOSS = "slime/backends/megatron_utils", "slime/backends/megatron_utils/loss.py"
CARRIES = {"slime/manager.py": 'train_data["weight_versions"] = []'}
FILES_BESIDE = {
    "ages": {"steps": [{"reject": {"max_staleness": 4}}]},
    "whole": {"preset": "m2"},
    "center": {"preset": "cispo", "center": {"top_k": 8}},
}
AGES, WHOLE, CENTER = (
    f"--use-tis --custom-tis-function-path slime_ext.tis.correct --custom-config-path {name}.yaml"
    for name in FILES_BESIDE
)
CENTER += f" {INIT} --custom-generate-function-path slime_ext.host.generate"
MEASURED = "--get-mismatch-metrics"
FLAGS_OF_A_HOST = " ".join(f'"{flag_of(name)}"' for name in (*DECISIVE, "sglang_router_ip"))
BEFORE_LOG = FLAGS_OF_A_HOST.replace("--custom-rollout-log-function-path", "--no-such-flag")
OF_THE_HOST = [  # flags, the checkout's files (None: no checkout), a line of the answer
    (CISPO, {}, "which slime does not pass to a hook"),
    (CISPO, {LOSS: PATCHED}, "ok"),
    (f"{CISPO} --custom-megatron-init-path mine.init", None, "not checked whether mine.init calls slime_ext"),
    (f"{CISPO} --custom-megatron-init-path mine.init", {LOSS: PATCHED}, "ok"),
    (f"{AGES} {INIT}", {}, "max_staleness: expected the samples' weight versions, got a slime that keeps th"),
    (f"{AGES} {INIT}", CARRIES, "ok"),
    (f"{AGES} {INIT}", {"slime/arguments.py": BEFORE_LOG}, "has no --custom-rollout-log-function-path: use"),
    (f"{AGES} {INIT} {LOG}", {"slime/arguments.py": "--no-such-flag"}, "expected a host that has this flag,"),
    (f"{WHOLE} {MEASURED} {INIT}", {f"{ROOM}/model.py": ""}, "expected a trainer with train_one_step beside"),
    (f"{WHOLE} {INIT} --num-steps-per-rollout 1", {}, "ok"),  # a slime before v0.3.0 has them always
    (f"{WHOLE} {INIT} --num-steps-per-rollout 1", {f"{ROOM}/actor.py": "can_reuse_log_probs_in_loss = 1"},
     "--get-mismatch-metrics: expected on with"),
    (CENTER, None, "not checked whether the sampler's head reaches this host's loss: no checkout of the hos"),
    (CENTER, {}, "slime_ext.center: expected a host with get_responses among its modules, got slime without"),
    (CENTER, {f"{ROOM}/parts.py": "def get_responses(): pass"}, "ok"),
    (f"{GOOD} {INIT}", {LOSS: "def policy_loss_function(loss): pass"}, "this release is not known"),
    (f"{GOOD} {INIT}", {}, "ok"),
    (f"{INIT} --use-tis --custom-tis-function-path mine.hook", {}, "ok"),
    (f"{INIT} --use-tis --custom-tis-function-path mine.hook", {LOSS: PATCHED}, "add **kwargs to it"),
    (f"{INIT} --use-tis --custom-tis-function-path mine.init", None, "got an unexpected keyword argument 'p"),
]  # fmt: skip
KEYWORDS = "args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths"


@pytest.mark.parametrize(("flags", "files", "line"), OF_THE_HOST, ids=range(len(OF_THE_HOST)))
def test_ok_means_that_init_would_start_on_the_host_that_is_at_hand(
    capsys, tmp_path, monkeypatch, flags, files, line
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")
    for name, mapping in FILES_BESIDE.items():
        written(tmp_path / f"{name}.yaml", {"slime_ext": mapping})
    written(tmp_path / "mine.py", f"def init(args): ...\ndef hook({KEYWORDS}): ...\n")
    script = written(tmp_path / "run.sh", f"python3 train.py {flags}")
    host = {
        "train.py": "",
        LOSS: f"{trees.TARGET}{trees.LOSS}",
        f"{ROOM}/model.py": trees.STEP.format(loss="loss"),
        "slime/arguments.py": FLAGS_OF_A_HOST,
    }
    for name, text in ({} if files is None else host | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        written(tmp_path / name, text)
    status, out, err = run(capsys, "check", script)
    lines = [" ".join(each.split()) for each in (err or out).splitlines()]
    unsure = "some things are unknown here, so not everything was checked"
    last = "ok" if line == "ok" else unsure if "not checked" in line else ""
    assert any(line in each for each in lines) and (lines[-1] == last or err), lines
    assert status == bool(err) and bool(err) != bool(last)


HINTED = f"{GOOD} --tis-clip 5"  # which token_tis does not read
IGNORED = ("--ignore", "unread_tis_clip", "--ignore", "missing_metrics")


def test_a_rule_that_warns_or_hints_is_ignored_by_its_name(capsys, tmp_path):
    script = written(tmp_path / "run.sh", f"python3 train.py {HINTED}")
    out = run(capsys, "check", script)[1]
    assert "[unread_tis_clip]" in out and "[missing_metrics]" in out
    status, out, err = run(capsys, "check", script, *IGNORED[:2])
    assert (status, err) == (0, "") and "tis-clip" not in out and "[missing_metrics]" in out
    assert "note" not in run(capsys, "check", *IGNORED, script)[1]


def test_a_warning_fails_on_demand_unless_it_is_ignored(capsys, tmp_path):
    script = written(tmp_path / "run.sh", f"python3 train.py {HINTED}")
    assert run(capsys, "check", script, "--fail-on", "error")[0] == 0
    for words in ((), ("--json",)):
        status, out, err = run(capsys, "check", script, "--fail-on", "warning", *words)
        assert (status, err) == (1, "") and "unread_tis_clip" in out
    assert run(capsys, "check", script, "--fail-on", "warning", *IGNORED)[0] == 0


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("missing_metric", "expected a rule's name, got 'missing_metric'; did you mean 'missing_metrics'?"),
        ("no rule", "expected a rule's name, got 'no rule': slime-ext check --rules lists the rules"),
        (
            "missing_init",
            "expected a rule that warns or hints, got missing_init (slime_ext would be wrong, o",
        ),
        ("rollout_logprobs_beside_tis", "got rollout_logprobs_beside_tis (the host refuses it): change the"),
    ],
)
def test_another_name_behind_ignore_is_one_line(capsys, tmp_path, name, line):
    script = written(tmp_path / "run.sh", f"python3 train.py {GOOD}")
    status, out, err = run(capsys, "check", script, "--ignore", name)
    assert (status, out) == (1, "") and err.startswith("slime-ext check: --ignore: ") and line in err
    assert err.count("\n") == 1


def in_json(capsys, folder, flags, *more):
    status, out, err = run(capsys, "check", written(folder / "run.sh", f"train.py {flags}"), "--json", *more)
    assert err == "" and out.endswith("}\n")
    answer = json.loads(out)
    assert [*answer] == ["file", "status", "resolved", "lines", "not_checked", "error"]
    assert answer["file"] == str(folder / "run.sh") and status == (answer["status"] == "error")
    return answer


def test_json_has_what_the_table_says(capsys, tmp_path):
    answer = in_json(capsys, tmp_path, HINTED)
    assert answer["status"] == "ok" and answer["error"] is None and answer["not_checked"] == []
    assert answer["resolved"]["steps"] == "reweight(token) > truncate(high 2)"
    assert [(line["rule"], line["severity"]) for line in answer["lines"]] == [
        ("unread_tis_clip", "warn"),
        ("missing_metrics", "hint"),
    ]
    hint = "no metrics: in slime add --custom-megatron-init-path slime_ext.host.init"
    assert answer["lines"][1]["message"] == hint
    assert in_json(capsys, tmp_path, HINTED, *IGNORED)["lines"] == []
    (note,) = in_json(capsys, tmp_path, f"{GOOD} {INIT} --eps-clip 0.1 --eps-clip 0.2")["lines"]
    assert (note["rule"], note["severity"]) == (None, None) and "--eps-clip 0.2 counts" in note["message"]
    assert in_json(capsys, tmp_path, "--lr 1")["status"] == "unused"


def test_json_holds_the_flags_to_add_alone_and_what_they_do_beside_them(capsys, tmp_path):
    offered = in_json(capsys, tmp_path, "--use-tis --custom-megatron-init-path far.away.init")["resolved"]
    del offered["slime_ext"]
    replaced = "replaces far.away.init; or keep that and call slime_ext.host.init(args) in it"
    assert offered == {
        "first": INIT,
        "first_comments": ["measures the mismatch only; applies no correction", replaced],
        "then": f"--custom-tis-function-path slime_ext.tis.token_tis {INIT}",
        "then_comments": [
            "policy loss times min(proximal / behavior, 2); slime-ext presets lists other corrections",
            "synchronous, k3_kl above 0.005: find the fault. If slime-ext analyze finds none, compare runs "
            "with and without token_tis",
            "replaces the host's own weights",
            replaced,
        ],
    }


@pytest.mark.parametrize(
    ("program", "flags", "row"),
    [
        ("train.py", "--hf-checkpoint /root/Qwen3-4B", decision.FAR),
        ("train.py", "--hf-checkpoint /fp8/Point4-Sprint8B", decision.FAR),
        ("train.py", "--hf-checkpoint $BASE_DIR/GLM-5.2-FP8/", decision.ROUNDED),
        ("train.py", "--hf-checkpoint /root/Moonlight-16B-A3B-Instruct-INT4", decision.ROUNDED),
        ("train.py", "--hf-checkpoint /root/Qwen3-4B --sglang-quantization fp8", decision.ROUNDED),
        ("train_async.py", "--hf-checkpoint /root/Qwen3-4B-FP8", decision.LAGGING),
    ],
)
def test_the_offered_correction_has_the_row_of_the_decision_table(capsys, tmp_path, program, flags, row):
    _, out, _ = run(capsys, "check", written(tmp_path / "run.sh", f"{program} {flags}"), "--json")
    comments = json.loads(out)["resolved"]["then_comments"]
    assert comments[1] == decision.plain(f"{row.run}: {row.advice}")


def test_json_names_what_was_not_checked_and_why(capsys, tmp_path):
    answer = in_json(capsys, tmp_path, f"{GOOD} {INIT} --loss-type $LOSS")
    assert answer["status"] == "incomplete" and answer["error"] is None
    reasons = [(row["rule"], row["why"]) for row in answer["not_checked"]]
    assert ("sft_beside_function", "--loss-type is known only where the script runs") in reasons
    assert (
        None,
        "run.sh:1: --loss-type $LOSS: known only where the script runs, so no rule checks it",
    ) in reasons
    answer = in_json(capsys, tmp_path, f"{CISPO} --custom-megatron-init-path far.away.init")
    (row,) = answer["not_checked"]
    assert answer["status"] == "incomplete" and row["rule"] == "missing_init"
    assert row["why"].startswith("whether far.away.init calls slime_ext.host.init(args), without which")


@pytest.mark.parametrize(
    ("flags", "rule", "severity", "message"),
    [
        (CISPO, "missing_init", "refuse", NO_TARGET),
        (
            f"--use-tis --use-rollout-logprobs {INIT}",
            "rollout_logprobs_beside_tis",
            "host",
            "the host refuses",
        ),
        (f"{GOOD}_of_no_name", None, None, "expected a function of slime_ext.tis"),
        (f"{GOOD} --tis-clip nan", None, None, "--tis-clip: expected a number"),
    ],
)
def test_json_holds_the_error(capsys, tmp_path, flags, rule, severity, message):
    answer = in_json(capsys, tmp_path, flags)
    error = answer["error"]
    assert (answer["status"], error["rule"], error["severity"]) == ("error", rule, severity)
    assert message in error["message"] and not error["message"].endswith("]")


def test_json_holds_the_error_of_a_file_or_a_flag_that_cannot_be_read(capsys, tmp_path):
    for words, message in (
        ([tmp_path / "none.sh"], "expected"),
        ([FILES[0], "--ignore", "no_rule"], "--ignore: expected a rule's name"),
        ([FILES[0], "--host", tmp_path], "--host"),
    ):
        status, out, err = run(capsys, "check", *words, "--json")
        assert (status, err) == (1, "") and message in json.loads(out)["error"]["message"]


def test_the_host_whose_weights_would_be_replaced_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")
    room = tmp_path / "miles/backends/megatron_utils"
    room.mkdir(parents=True)
    written(tmp_path / "train.py", "")
    written(room / "loss.py", f"{trees.TARGET}{trees.LOSS}")
    written(room / "model.py", trees.STEP.format(loss="loss"))
    written(tmp_path / "miles/arguments.py", FLAGS_OF_A_HOST)
    script = written(tmp_path / "run.sh", f"python3 train.py {SIZES} --use-tis")
    assert "replaces miles's own weights" in run(capsys, "check", script)[1]


def test_a_checkout_elsewhere_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path / "run.sh", f"python3 train.py {CISPO}")
    (tmp_path / "far" / ROOM).mkdir(parents=True)
    written(tmp_path / "far/train.py", "")
    written(tmp_path / "far" / LOSS, PATCHED)
    written(tmp_path / "far" / ROOM / "model.py", trees.STEP.format(loss="loss"))
    written(tmp_path / "far/slime/arguments.py", FLAGS_OF_A_HOST)
    assert NO_TARGET in run(capsys, "check", script)[2]
    assert run(capsys, "check", script, "--host", tmp_path / "far")[1].endswith("ok\n")
    assert run(capsys, "check", script, "--host", tmp_path)[2].startswith("slime-ext check: --host")
    written(script, f"cd {tmp_path}/far && python3 train.py {CISPO}")
    assert run(capsys, "check", script)[1].endswith("ok\n")


def test_a_launch_with_slimes_own_mis_is_offered_ours_without_a_change_of_its_file(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")
    written(
        tmp_path / "mis.yaml", {"use_tis": True, "use_rs": True, "tis_level": "token", "tis_mode": "mask"}
    )
    flags = "--custom-config-path mis.yaml --custom-tis-function-path anothers.weights"
    script = written(tmp_path / "run.sh", f"python3 train.py {flags}")
    status, out, _ = run(capsys, "check", script)
    assert status == 0 and "indent" not in out and "note" not in out
    assert "first" in out and "then" in out
    assert "anothers.weights: leave out mis.yaml, which configures that hook, or run slime-ext convert" in out
    status, _, err = run(capsys, "check", tmp_path / "mis.yaml")
    assert status == 1 and "got keys of slime_mis (" in err and "slime-ext convert --from slime_mis" in err

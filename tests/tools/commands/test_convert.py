"""What ``convert`` says of another system's block or whole configuration: golden/convert.txt."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml

from slime_ext import load_config
from slime_ext.tools.convert import read
from slime_ext.tools.convert.elsewhere import ELSEWHERE
from tests.golden import pairs
from tests.tools.commands.in_process import run, written


def test_what_a_configuration_converts_to_is_written_down(capsys, tmp_path):
    """Our keys, below the comments before them; or the refusal."""

    def answer(line):
        system, _, whole = line.partition(" ")
        status, out, err = run(capsys, "convert", "--from", system, written(tmp_path / "c.yaml", whole))
        assert (status, bool(err)) in ((0, False), (2, True)) and (not err or out == "")
        if err:
            return err.replace(f"{tmp_path}/", "").splitlines()
        said = yaml.safe_dump(yaml.safe_load(out), sort_keys=False, default_flow_style=True, width=10**6)
        return [*(each for each in out.splitlines() if each.startswith("#")), said.strip()]

    assert len(pairs(Path(__file__).parent / "golden/convert.txt", answer)) > 25


BLOCKS = {
    "verl": {"algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_rs": "token_k1",
                                                  "rollout_rs_threshold": "0.5_1.5"}}},
    "skyrl": {"trainer": {"algorithm": {"off_policy_correction": {"tis_ratio_type": "sequence"}, "lr": 1}}},
    "fireworks": {"cap": 5.0, "level": "sequence"},
    "slime_mis": {"use_tis": True, "use_rs": False, "tis_level": "token", "tis_mode": "clip",
                  "tis_upper_bound": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("system", BLOCKS)
def test_what_convert_prints_is_what_the_block_means(capsys, tmp_path, system):
    status, out, _ = run(capsys, "convert", "--from", system, written(tmp_path / "c.yaml", BLOCKS[system]))
    native = yaml.safe_load(out)
    block = BLOCKS[system]
    block = block.get("algorithm", block).get("rollout_correction", block)
    block = block["trainer"]["algorithm"]["off_policy_correction"] if system == "skyrl" else block
    assert status == 0 and native["custom_tis_function_path"] == "slime_ext.tis.correct"
    assert load_config(native["slime_ext"]) == load_config(read(system, block).mapping)


WHOLE = Path(__file__).parents[1] / "convert/golden/blocks.txt"


def accepted_blocks():
    """Each (system, block as text) of the table that converts."""
    rows = WHOLE.read_text().split("\n\n")
    cases = [
        row.split("\n", 1)
        for row in rows
        if row.strip() and not row.split("\n", 1)[1].lstrip().startswith("convert.")
    ]
    return [question.split(" ", 1) for question, _ in cases]


def test_without_a_system_the_answer_is_that_of_the_systems_own_or_a_question(capsys, tmp_path):
    """Never another system's reading of the same keys."""
    answers = {"found": 0, "asked": 0}
    for system, block in accepted_blocks():
        file = written(tmp_path / "c.yaml", block)
        out, err = run(capsys, "convert", file)[1:]
        if "add --from SYSTEM" not in err:
            assert (out, err) == run(capsys, "convert", "--from", system, file)[1:], (system, block)
            answers["found"] += 1
        else:
            assert "add --from SYSTEM, one of " in err, (system, block, err)
            assert system in err.rsplit(" one of ", 1)[1], (system, block, err)
            answers["asked"] += 1
    assert answers["found"] > 50 and 0 < answers["asked"] < 20


CALL = "python3 -m verl.trainer.main_ppo"
KEY = "algorithm.rollout_correction.rollout_is"
WRITTEN_OUT = {"rollout_is": "token", "rollout_is_threshold": 2.5}
SCRIPTS = {  # a script -> the block that it means, or a part of the refusal
    f"{CALL} {KEY}=token +{KEY}_threshold=2.5 data.path=$DATA\n": WRITTEN_OUT,
    f"LEVEL=token\nCAP='2.5'\n{CALL} \\\n  {KEY}=$LEVEL {KEY}_threshold=${{CAP}} \\\n  $@\n": WRITTEN_OUT,
    f"{CALL} algorithm.rollout_correction.rollout_rs='\"token_k1,seq_mean_k3\"' "
    "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0,0.1' trainer.use_v1=false\n": {
        "rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_2.0,0.1", "use_v1": False},
    f"{CALL} algorithm.rollout_correction.bypass_mode=true {KEY}=token\n": {
        "bypass_mode": True, "rollout_is": "token", "policy_loss": {"loss_mode": "vanilla"}},
    f"{CALL} {KEY}=$LEVEL\n": "expected a value of algorithm.rollout_correction.rollout_is, got",
    f"LEVEL=token\nLEVEL=sequence\n{CALL} {KEY}=$LEVEL\n": "expected a value of",
    f"if true; then\n  LEVEL=token\nfi\n{CALL} {KEY}=$LEVEL\n": "expected a value of",
    f"LEVEL=${{LEVEL:-token}}\n{CALL} {KEY}=$LEVEL\n": "expected a value of",
    f"for LEVEL in token; do {CALL} {KEY}=$LEVEL; done\n": "expected",
    f"{CALL} --config-name mine {KEY}=token\n": "expected key=value, got '--config-name'",
    f"{CALL} ${{MORE[@]}} {KEY}=token\n": "expected key=value",
    f"{CALL} ~algorithm.rollout_correction {KEY}=token\n": "expected a value of algorithm.rollout_correction",
    f"{CALL} {KEY}=token\n{CALL} {KEY}=sequence\n": "expected one call of verl.trainer.main_ppo, got 2",
    f"{CALL} data.path=a\n": "expected algorithm.rollout_correction, got none",
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_overrides_of_verl_in_a_script_are_read_where_they_are_plain(capsys, tmp_path, script):
    status, out, err = run(capsys, "convert", "--from", "verl", written(tmp_path / "run.sh", script))
    if isinstance(SCRIPTS[script], str):
        assert (status, out) == (2, "") and SCRIPTS[script] in err and err.count("\n") == 1
    else:
        reading = read("verl", SCRIPTS[script])
        assert status == 0 and load_config(yaml.safe_load(out)["slime_ext"]) == load_config(reading.mapping)
        assert ("what the caller of the script adds ($@) is not read" in out) == ("$@" in script)


def test_standard_input_is_read_and_a_file_is_written(capsys, tmp_path, monkeypatch):
    block = {"algorithm": {"rollout_correction": {"rollout_is": "token"}}}
    printed = run(capsys, "convert", written(tmp_path / "c.yaml", block))[1]
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump(block)))
    assert run(capsys, "convert", "-") == (0, printed, "")
    out = tmp_path / "native.yaml"
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump(block)))
    status, said, _ = run(capsys, "convert", "--from", "verl", "--out", str(out), "-")
    assert status == 0 and str(out) in said and out.read_text() == printed
    status, said, err = run(capsys, "convert", "--out", str(tmp_path), str(tmp_path / "c.yaml"))
    assert (status, said) == (2, "") and err.startswith(
        "slime-ext convert: --out: expected a file to write, got"
    )


def test_keys_of_openrlhf_before_0_11_are_told_from_a_misspelling(capsys, tmp_path):
    for key in ("is_correction_enable", "is_correction_type", "enable_vllm_is_correction"):
        file = written(tmp_path / "c.yaml", {key: True, "is_correction_threshold": [0.5, 5.0]})
        err = run(capsys, "convert", "--from", "openrlhf", file)[2]
        assert f"{key}: expected a key of the release of openrlhf" in err and "did you mean" not in err


@pytest.mark.parametrize("system", ELSEWHERE)
def test_a_key_of_a_system_without_a_reader_is_never_read_as_anothers(capsys, tmp_path, system):
    for key in ELSEWHERE[system].keys:
        beside = {"vllm_importance_sampling_mode": "token_mask", key: 1}
        for words in ([], ["--from", "trl"]):
            status, out, err = run(capsys, "convert", *words, written(tmp_path / "c.yaml", beside))
            assert (status, out) == (2, "") and f"got {ELSEWHERE[system].title}: " in err


@pytest.mark.parametrize("system", [*ELSEWHERE, "unsloth"])
def test_a_system_without_a_reader_is_refused_by_the_name_that_it_gives_itself(capsys, tmp_path, system):
    title = ELSEWHERE[system].title
    file = written(tmp_path / "c.yaml", {"vllm_importance_sampling_mode": "token_mask"})
    for name in (title, title.lower(), title.replace("-", "_").upper(), system):
        status, out, err = run(capsys, "convert", "--from", name, file)
        assert (status, out) == (2, "") and f"got {title}: " in err, name


def test_a_reader_is_named_in_any_spelling(capsys, tmp_path):
    file = written(tmp_path / "c.yaml", {"rollout_importance_sampling_mode": "token_truncate"})
    status, wanted, _ = run(capsys, "convert", "--from", "ms_swift", file)
    for name in ("ms-swift", "MS-Swift"):
        assert run(capsys, "convert", "--from", name, file) == (status, wanted, "") and not status


def test_a_key_that_two_systems_have_does_not_make_one_of_the_other(capsys, tmp_path):
    beta = {"beta": 0.04, "learning_rate": 1.0e-6}
    trl = {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", **beta}
    said = run(capsys, "convert", "--from", "trl", written(tmp_path / "c.yaml", trl))
    assert said[0] == 0 and "beta: 0.04 belongs to trl's loss" in " ".join(said[1].split())
    assert run(capsys, "convert", written(tmp_path / "c.yaml", trl)) == said
    swift = {"use_vllm": True, "rollout_importance_sampling_mode": "token_mask", **beta}
    assert run(capsys, "convert", "--from", "ms_swift", written(tmp_path / "c.yaml", swift))[0] == 0
    status, _, err = run(capsys, "convert", "--from", "trl", written(tmp_path / "c.yaml", swift))
    assert status == 2 and "it is a block of ms_swift; use --from ms_swift" in err


def test_a_part_of_axolotls_file_is_not_read_as_trls(capsys, tmp_path):
    trl = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_mask"}
    status, out, err = run(capsys, "convert", written(tmp_path / "c.yaml", {"rl": "grpo", "trl": trl}))
    assert (status, out) == (2, "") and "got axolotl: " in err
    status, out, err = run(capsys, "convert", written(tmp_path / "c.yaml", {"trl": trl}))
    assert (status, err) == (0, "") and "# note: a block named trl is read as TRL's settings" in out
    status, out, err = run(capsys, "convert", written(tmp_path / "c.yaml", trl))
    assert (status, err) == (0, "") and "a block named trl" not in out


CUT = {"roll": {"train_infer_correction": {"is_weight": {"enabled": True}}},
       "nemo_rl": {"loss_fn": {"truncated_importance_sampling_type": "tis"}},
       "prime_rl": {"trainer": {"loss": {"type": "ipo", "kl_tau": 0.001}}},
       "open_instruct": {"rollout_importance_correction": "clipped"}}  # fmt: skip


@pytest.mark.parametrize("system", CUT)
def test_a_system_without_a_reader_is_refused_with_the_place_of_its_table(capsys, tmp_path, system):
    """By its name in a stale command, and by its keys."""
    title = ELSEWHERE[system].title
    file, pages = written(tmp_path / "c.yaml", CUT[system]), Path(__file__).parents[3] / "docs/convert.md"
    for words in (["--from", system, file], [file]):
        status, out, err = run(capsys, "convert", *words)
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert f"got {title}: convert has no reader for it: " in err
        assert err.endswith(f" the table {title} of docs/convert.md\n")
    assert f"\n### {title}\n" in pages.read_text()


def test_what_converts_to_a_whole_step_brings_what_that_needs(capsys, tmp_path):
    rejects = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
    whole = {"algorithm": {"rollout_correction": rejects}, "trainer": {"use_v1": False}}
    block = written(tmp_path / "v.yaml", whole)
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

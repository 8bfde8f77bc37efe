"""``slime-ext analyze`` as a user meets it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from slime_ext import presets
from slime_ext.hosts.contract import INIT_FLAG
from slime_ext.tools import decision
from slime_ext.tools.analysis.findings import recommend
from slime_ext.tools.analysis.request import SHORTLIST
from slime_ext.tools.analysis.run import Request, analyse
from slime_ext.tools.commands import analyze as command
from slime_ext.tools.commands import cli
from slime_ext.tools.commands.analyze_summary import summary
from slime_ext.tools.commands.output import PlainConsole, console
from tests.tools.analysis import dumps
from tests.tools.analysis.documents import document
from tests.tools.analysis.synthetic import World, recorded_late, run

SMALL = World(rollouts=2, samples=12, length=24)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    healthy = run(SMALL)
    dumps.write_run(path / "healthy", healthy)
    dumps.write_run(path / "shifted", recorded_late(healthy, 1))
    return path


def analyze(capsys, *words):
    status = cli.main(["analyze", *(str(word) for word in words)])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_healthy_run(capsys, runs):
    status, out, err = analyze(capsys, runs / "healthy", "--fail-on", "any")
    assert (status, err) == (0, "") and "No fault found" in out


@pytest.mark.parametrize("more", [(), ("--follow", "--every", "0", "--idle", "2")], ids=["", "follow"])
def test_it_computes_in_one_thread(capsys, runs, more):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert analyze(capsys, runs / "healthy", *more)[0] == 0
        assert torch.get_num_threads() == 1  # busy threads took five times the processor time
    finally:
        torch.set_num_threads(before)


def test_a_file_that_is_no_dump_is_said_in_whole_words(capsys, tmp_path):
    page = tmp_path / "report.html"
    page.write_text("<html></html>")
    status, _, err = analyze(capsys, page)
    assert status == 2
    assert f"{page}: is no torch file: expected a .pt of slime, .straw.json or .jsonl" in err
    (tmp_path / "0.pt").write_bytes(b"PK cut off")
    assert "0.pt: is cut off or no torch file (RuntimeError)" in analyze(capsys, tmp_path / "0.pt")[2]


def test_what_to_do_comes_before_the_table_and_definitions_are_in_the_report(capsys, runs, tmp_path):
    shutil.copytree(runs / "shifted", tmp_path / "run")
    content = torch.load(tmp_path / "run/train_data/0.pt")
    del content["samples"][0]["log_probs"]
    torch.save(content, tmp_path / "run/train_data/0.pt")
    page = tmp_path / "r.html"
    _, out, _ = analyze(capsys, tmp_path / "run", "--out", page)
    order = ("Fix first: ", "error off_by_one", "  -> ", "then analyse again", "note ", "k3, nats per token")
    places = [out.index(words) for words in order]
    assert places == sorted(places) and "note " in out and "log-probs are missing" in out
    assert "log trainer" not in out and "outside_vocabulary" not in out and "outside (below 0.005)" in out
    written = page.read_text()
    assert "log trainer" in written and "outside_vocabulary" in written and "below 2" in written


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("60", 60), ("132", 132)])
def test_outside_a_terminal_tables_are_as_wide_as_columns_says(capsys, runs, monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    _, out, _ = analyze(capsys, runs / "healthy")
    lines = out.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("k3, nats per token")) :]
    assert len(table) > 10 and max(map(len, table)) <= width
    assert not [line for line in lines if line != line.rstrip()]
    prose = [line for line in lines if "--" not in line and "/" not in line]  # flags and paths are one line
    assert (max(map(len, prose)) <= width) == bool(columns)


def test_a_fault_is_named_and_fails_on_demand(capsys, runs, tmp_path):
    report, data = tmp_path / "r.html", tmp_path / "r.json"
    words = (runs / "shifted", "--out", report, "--json", data, "--fail-on", "off_by_one")
    status, out, _ = analyze(capsys, *words)
    assert status == 1 and "error off_by_one" in out and "shifted by 1 token" in out
    found = json.loads(data.read_text())
    assert [f["name"] for f in found["findings"]] == ["off_by_one"] and found["total"]["sequences"] == 24
    assert "<html" in report.read_text()


def test_the_summary_says_nothing_twice(capsys, runs):
    for name, headline in (("healthy", "No fault found: "), ("shifted", "Fix first: The sampler's")):
        out = analyze(capsys, runs / name)[1]
        parts = [part.strip() for part in re.split(r"[.:;,]\s|\n", out.lower())]
        said = [part for part in parts if len(part.split()) > 2]
        assert headline in out and len(said) > 5
        assert [part for part in said if out.lower().count(part) > 1] == []


def test_a_severity_fails_as_its_findings_do():
    def fails(severity, *words):
        found = [SimpleNamespace(name="it", severity=severity, or_else=("other",))]
        return bool(command._failing(words, found))

    for word, severities in {
        "error": {"error"},
        "warning": {"error", "warning"},
        "any": {"error", "warning"},
    }.items():
        assert {s for s in ("error", "warning", "note") if fails(s, word)} == severities
    assert fails("note", "it") and fails("warning", "other") and not fails("error")


def test_what_fails_a_run_is_the_last_line(capsys, runs):
    status, out, _ = analyze(capsys, runs / "shifted", "--fail-on", "any")
    assert status == 1 and out.splitlines()[-1] == "failed by --fail-on any: off_by_one (error)"


def test_two_runs_side_by_side(capsys, runs, tmp_path):
    data = tmp_path / "r.json"
    status, out, _ = analyze(capsys, runs / "healthy", "--against", runs / "shifted", "--json", data)
    assert status == 0 and "healthy" in out and "shifted" in out and "off_by_one" in out
    assert [d["name"] for d in json.loads(data.read_text())] == ["healthy", "shifted"]


def test_what_is_pasted_is_one_line_on_a_narrow_terminal(runs):
    for columns in [40, 80]:
        document = analyse(request := Request((str(runs / "healthy"),), rate=0.1), request.files())
        screen = PlainConsole(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
        summary(screen, [document])
        printed = screen.file.getvalue().splitlines()
        assert f"  {document.recommendation.flags}" in printed
        assert sum("to reject 0.1 by" in line and line.endswith("s)") for line in printed) == len(
            document.suggestions
        )


def test_a_pipe_gets_every_line_whole(capsys, tmp_path):
    path = tmp_path / ("n" * 200 + ".jsonl")
    path.write_text(f'{{"loss": 1}}\n{json.dumps({"behavior": [-1.0], "proximal": [-1.0]})}\n')
    _, out, _ = analyze(capsys, path)
    assert f"  {path}:1: has neither rollout_log_probs nor log_probs, so it is not a sample\n" in out


def test_json_on_stdout_is_json_alone(capsys, runs):
    status, out, err = analyze(capsys, runs / "healthy", "--json", "-")
    assert status == 0 and json.loads(out)["name"] == "healthy" and "keep measuring" in err


def test_the_flag_that_only_measures_says_what_it_does(capsys, runs):
    _, out, _ = analyze(capsys, runs / "healthy")
    lines = [line.strip() for line in out.splitlines()]
    at = lines.index(INIT_FLAG)
    assert lines[at - 1].endswith("which logs k3 and other metrics at each step and corrects nothing:")


def test_thresholds_are_printed_as_they_are(capsys, runs, tmp_path):
    data = tmp_path / "r.json"
    _, out, _ = analyze(capsys, runs / "healthy", "--suggest", "0.1", "--json", data)
    suggested = json.loads(data.read_text())["suggestions"]
    bounds = [s[end] for s in suggested for end in ("low", "high") if s[end] is not None]
    assert bounds and all(repr(bound) in out for bound in bounds)


def effects_beside(capsys, runs, tmp_path, *files):
    data = tmp_path / "r.json"
    words = [word for file in files for word in ("--config", file)]
    assert analyze(capsys, runs / "healthy", *words, "--json", data)[0] == 0
    return {effect["name"]: effect for effect in json.loads(data.read_text())["effects"]}


def test_a_file_of_a_presets_name_stands_beside_the_preset(capsys, runs, tmp_path):
    own = tmp_path / "token_tis.yaml"
    own.write_text("slime_ext:\n  steps: [{reject: {high: 1.0}}]\n")
    found, alone = effects_beside(capsys, runs, tmp_path, own), effects_beside(capsys, runs, tmp_path)
    mine = found.pop(f"token_tis ({own})")
    assert found == alone and "reject" in mine["formula"] and not mine["source"]
    assert mine["kept_tokens"] < found["token_tis"]["kept_tokens"]


def test_the_clip_range_of_a_file_is_the_files(capsys, runs, tmp_path):
    clip = "slime_ext:\n  surrogate: {ppo_clip: {anchor: behavior}}\n"
    for name, keys in (
        ("narrow", "eps_clip: 1.0e-6\neps_clip_high: 1.0e-6\n"),
        ("wide", "eps_clip: 0.9\n"),
        ("bare", ""),
    ):
        (tmp_path / f"{name}.yaml").write_text(keys + clip)
    files = [tmp_path / f"{name}.yaml" for name in ("narrow", "wide", "bare")]
    found = effects_beside(capsys, runs, tmp_path, *files)
    assert (
        found["narrow"]["clipped_tokens"]
        > 0
        == found["wide"]["clipped_tokens"]
        == found["bare"]["clipped_tokens"]
    )


def test_a_file_that_can_be_read_but_once_is(capsys, runs):
    """As a shell's <(command)."""
    reading, writing = os.pipe()
    os.write(writing, b"slime_ext: {preset: token_tis}")
    os.close(writing)
    status, _, err = analyze(capsys, runs / "healthy", "--config", f"/dev/fd/{reading}")
    os.close(reading)
    assert (status, err) == (0, "")


def test_rollouts_and_a_correction_of_ones_own(capsys, runs, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("slime_ext:\n  preset: token_tis\n")
    data = tmp_path / "r.json"
    words = (runs / "healthy", "--rollouts", "1", "--config", config, "--suggest", "0.1", "--json", data)
    assert analyze(capsys, *words)[0] == 0
    found = json.loads(data.read_text())
    assert [m["rollout_id"] for m in found["timeline"]] == [1]
    assert "mine" in [e["name"] for e in found["effects"]] and found["suggestions"]


FILES = {
    "a/mine.yaml": "slime_ext: {preset: token_tis}",
    "b/mine.yaml": "slime_ext: {preset: token_tis}",
    "clip.yaml": "eps_clip: 1e-4\nslime_ext: {preset: token_tis}",
    "name.yaml": "slime_ext: {preset: token_iss}",
    "type.yaml": "slime_ext: {steps: [{truncate: {high: x}}]}",
    "none/0.pt": "no dump",
    "lines.jsonl": "{}\n"
    + "".join(f'{{"behavior": [-1.0], "proximal": [-1.0], "rollout_id": {n}}}\n' for n in (4, 6)),
}
MISTAKES = """
    nowhere -> nowhere: expected a folder, a file or a pattern
    none -> no torch file
    RUN --jobs 0 -> --jobs: expected at least 1
    RUN --suggest 2 -> --suggest: expected a share between 0 and 1, got 2
    RUN --fail-on off_by_on -> did you mean 'off_by_one'?
    RUN --rollouts 77 -> --rollouts: expected some of 0-1, got none: type numbers in that range
    lines.jsonl --rollouts 77 -> --rollouts: expected some of 4-6, got none: type numbers in that range
    RUN --rollouts x -> --rollouts: expected numbers and ranges
    RUN --config none.yaml -> none.yaml: expected a readable file
    RUN --config clip.yaml -> slime-ext analyze: clip.yaml: --eps-clip: expected a number
    RUN --config name.yaml -> slime-ext analyze: name.yaml: slime_ext.preset: expected a known preset
    RUN --config type.yaml -> slime-ext analyze: type.yaml: slime_ext.steps[0].truncate.high: expected
    RUN --config a/mine.yaml --config b/mine.yaml -> expected each name once, got 'mine' twice
    RUN --tokenizer none.json -> --tokenizer: expected a folder with a tokenizer
    RUN --out . -> --out: expected a file that can be written, got '.': Is a directory
    RUN --out /proc/x/y.html -> /proc/x: expected a folder to write to, got No such file or directory
    RUN --json RUN/train_data/0.pt/x -> 0.pt: expected a folder to write to, got a file
    RUN --json LONG -> File name too long
    RUN --out - -> --out: expected a file, got '-': only --json writes to stdout
    RUN --out x/../same --json same -> --json: expected another file than --out, got 'same'
"""


def test_mistakes_are_one_line_and_status_2(capsys, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for line in MISTAKES.strip().splitlines():
        words, _, said = (
            line.replace("RUN", str(runs / "healthy")).replace("LONG", "n" * 300).partition(" -> ")
        )
        status, out, err = analyze(capsys, *words.split())
        assert (status, out, err.count("\n")) == (2, "", 1) and said in err, (line, err)


def test_what_cannot_be_written_is_told_before_anything_is_read(capsys, runs, monkeypatch):
    monkeypatch.setattr("slime_ext.tools.analysis.run.analyse", lambda *_: pytest.fail("read"))
    status, out, err = analyze(capsys, runs / "healthy", "--json", "/proc/x")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_nothing_is_written_over_what_is_read(capsys, tmp_path):
    for number, flag in enumerate(["--out", "--json"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "run.jsonl"
        path.write_text(text := '{"log_probs": [-1.0, -2.0], "rollout_log_probs": [-1.0, -2.1]}\n')
        config = folder / "own.yaml"
        config.write_text("slime_ext: {preset: token_tis}\n")
        for words in ((path, flag, folder / "." / "run.jsonl"), (path, "--config", config, flag, config)):
            status, out, err = analyze(capsys, *words)
            assert (status, out) == (2, "") and f"{flag}: expected a new file" in err
        (folder / "args.json").write_text("{}")
        (folder / "eval_0.pt").write_text("")
        for name in ("args.json", "eval_0.pt", "run.jsonl"):
            for more in ((), ("--follow",)):
                status, out, err = analyze(capsys, folder, *more, flag, folder / name)
                assert (status, out) == (2, "") and f"{flag}: expected a new file" in err
        assert path.read_text() == text and "preset" in config.read_text()


@pytest.mark.skipif(not os.access("/dev", os.W_OK), reason="only root may write to /dev")
def test_a_full_disk_costs_the_file_alone(capsys, runs):
    status, out, err = analyze(capsys, runs / "healthy", "--json", "/dev/full")
    assert (status, err.count("\n")) == (2, 1) and "got '/dev/full': No space left" in err
    assert "keep measuring" in out and "wrote" not in out


def test_a_run_that_cannot_be_read_leaves_no_empty_report(capsys, tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    assert analyze(capsys, "nowhere", "--out", tmp_path / "new.html", "--json", kept)[0] == 2
    assert kept.read_text() == "before" and not (tmp_path / "new.html").exists()


def test_presets_are_those_that_were_asked_for(capsys, runs):
    asked = {(): SHORTLIST, ("--presets", "token_tis,geo_rs"): ("token_tis", "geo_rs")}
    asked["--presets", "all"] = tuple(presets.PRESETS)
    for words, names in asked.items():
        _, out, _ = analyze(capsys, runs / "healthy", "--json", "-", *words)
        assert [effect["name"] for effect in json.loads(out)["effects"]] == list(names)


def test_the_shortlist_has_the_preset_that_runs_are_compared_with():
    assert decision.TRIAL in SHORTLIST


def test_no_flags_are_offered_beneath_an_error(capsys):
    error = replace(document().findings[0], severity="error")
    found = document(findings=(error,), recommendation=recommend.recommend((), document().total, (error,)))
    summary(console(), [found])
    out = capsys.readouterr().out
    assert "no recommendation before the faults are fixed" in out and "fix stale_weights first" in out
    assert "--custom-" not in out
    few = replace(document().total, sequences=5)
    summary(console(), [document(recommendation=recommend.recommend((), few))])
    assert f"  {INIT_FLAG}\n" in capsys.readouterr().out


ALONE = """
import gc, json, sys
from slime_ext.tools.commands import cli
cli.main(sys.argv[1:])
print(json.dumps([sorted(sys.modules), gc.get_freeze_count(), gc.isenabled()]))
"""


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory):
    """The command in a process of its own, which imports torch for 2 s: its text, modules and collector.

    Another package offers torch a device, which says when it starts.
    """
    folder = tmp_path_factory.mktemp("other")
    about = folder / "other-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nother = other_device:start\n")
    (folder / "other_device.py").write_text("def start():\n    print('started')\n")
    words = [sys.executable, "-c", ALONE, "analyze", str(runs / "healthy")]
    path = os.pathsep.join([str(folder), *sys.path])
    unset = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    ran = subprocess.run(words, capture_output=True, text=True, check=True, env=unset | {"PYTHONPATH": path})
    *text, last = ran.stdout.splitlines()
    return "\n".join(text), *json.loads(last)


def test_what_only_a_users_file_needs_is_not_imported(alone):
    modules = {"yaml", "pydantic", "matplotlib", "rich._emoji_codes", "slime_ext.config.load"}
    assert modules.isdisjoint(alone[1]) and "torch" in alone[1]


def test_what_torch_made_is_exempt_from_garbage_collections(alone):
    _, _, exempt, is_on = alone
    assert exempt > 100_000 and is_on


def test_devices_of_other_packages_are_left_alone(alone):
    assert "No fault found" in alone[0] and "started" not in alone[0]

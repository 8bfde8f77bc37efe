"""The ten lines of the page from evidence made here, each ok and wrong; the page as text."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from slime_ext_cpu.rehearsal import checks
from slime_ext_cpu.rehearsal.evidence import Evidence
from slime_ext_cpu.rehearsal.main import page
from tests.cpu.rehearsal.launches import launch

PATH = "slime_ext.tis.correct"
PARSED = {"event": "parsed", "advantage_estimator": "grpo", "use_tis": True, "get_mismatch_metrics": False}
HOOK = {
    "event": "function",
    "path": PATH,
    "sequences": 16,
    "names": ["a", "b"],
    "tokens": 256,
    "nonfinite": 0,
}
STEPS = [(rollout, step) for rollout in (0, 1) for step in range(4)]


def analysis(*distances, findings=()):
    timeline = [SimpleNamespace(numbers=SimpleNamespace(absolute=distance)) for distance in distances]
    return SimpleNamespace(findings=findings, timeline=timeline)


def sample(version):
    return {"response": "ab", "response_length": 2, "reward": 0, "weight_versions": [version]}


GOOD = Evidence(
    status=0,
    seconds=61.0,
    log=Path("/out/log"),
    events=(
        {**PARSED, "custom_tis_function_path": PATH},
        {"event": "engine"},
        {"event": "model", "parameters": 1000},
        *({"event": "push", "version": version} for version in (1, 2, 3)),
        *({**HOOK, "pid": pid} for pid in (7, 8) for _ in STEPS),
        *(
            {"event": "step", "rollout": r, "step": s, "losses": {"loss": 0.5}, "norm": 1.25}
            for r, s in STEPS
        ),
    ),
    rollouts={0: [sample("1")] * 16, 1: [sample("2")] * 16},
    analysis=analysis(0.004, 0.005),
    scalars={"train/loss": {0: 0.5}, "train/off_policy/k3": {0: 0.1}},
    checkpoint={"checkpoint/a": 2**20},
)


def of(seen, flags="--use-tis"):
    return {line.name: line for line in checks.lines(launch(flags), seen)}


def without(event, **changes):
    """The good evidence without one kind of call, or with a fact of it changed."""
    kept = [e for e in GOOD.events if e["event"] != event or changes]
    return replace(GOOD, events=tuple({**e, **changes} if e["event"] == event else e for e in kept))


def test_a_good_run_is_ten_times_ok():
    found = of(GOOD)
    assert len(found) == 10 and {line.state for line in found.values()} == {"ok"}
    assert "8 times on 2 ranks with 128 sequences, 2048 tokens; 2 metrics: a, b" in found["hook called"].text
    assert "'ab' -> reward 0" in found["sampled"].text and "8 optimizer steps" in found["trained"].text
    assert "versions 1 to 3; rollouts sampled with 1, 2" in found["weights pushed"].text
    assert "0.0040, 0.0050 nats" in found["weights pushed"].text


SHIFTED = SimpleNamespace(
    name="off_by_one", severity="error", title="The log-probs are shifted.", evidence="0.6 against 0.01."
)
NOTED = SimpleNamespace(name="few", severity="note", title="Short.", evidence="")
STALE = {0: [sample("1")] * 16, 1: [sample("1")] * 16}
WRONG = {
    "never called": (without("function"), "hook called", "never, although there were steps"),
    "without log-probs": (
        replace(
            GOOD, events=(*GOOD.events, {"event": "function", "path": PATH, "sequences": 1, "names": []})
        ),
        "hook called",
        "without log-probs of the sampler or the trainer in 1 calls",
    ),
    "NaN in the hook": (without("function", nonfinite=3), "hook called", "48 log-ratios are NaN or infinite"),
    "NaN loss": (
        without("step", losses={"loss": "nan"}),
        "trained",
        "rollout 0, step 0: loss or gradient norm",
    ),
    "infinite norm": (without("step", norm="inf"), "trained", "is not finite"),
    "steps": (without("step", step=0), "trained", "2 optimizer steps, expected 8"),
    "shifted": (replace(GOOD, analysis=analysis(0.6, findings=[SHIFTED])), "sampled", "0.6 against 0.01"),
    "NaN metric": (
        replace(GOOD, scalars={"train/x": {0: float("nan")}}),
        "metrics logged",
        "not finite: train/x",
    ),
    "one push": (without("push", version=1), "weights pushed", "the engine keeps its weights"),
    "same versions": (replace(GOOD, rollouts=STALE), "weights pushed", "sampled with 1, 1"),
    "distance grows": (replace(GOOD, analysis=analysis(0.004, 0.2)), "weights pushed", "0.0040, 0.2000 nats"),
}


def test_each_fault_is_on_its_line_alone():
    for name, (seen, line, text) in WRONG.items():
        found = of(seen)
        assert [n for n, x in found.items() if x.state != "ok"] == [line], name
        assert found[line].state == "WRONG" and text in found[line].text, name


def test_notes_and_staleness_of_an_asynchronous_run_are_no_faults():
    padded = SimpleNamespace(**vars(SHIFTED) | {"name": "outside_vocabulary"})  # rows that pad the twin's
    for finding in (NOTED, padded):
        seen = replace(GOOD, analysis=analysis(0.004, 0.005, findings=[finding]))
        assert of(seen)["sampled"].state == "ok"
    stale = replace(GOOD, rollouts=STALE, analysis=analysis(0.004, 0.2))
    found = checks.lines(launch("--use-tis", "train_async.py"), stale)
    assert {line.state for line in found} == {"ok"}


def test_the_flag_that_stops_the_push_is_named():
    seen = replace(without("push", version=1), rollouts=STALE)
    line = of(seen, "--update-weights-interval 1000")["weights pushed"]
    assert "(run.sh:27: --update-weights-interval 1000)" in line.text


def test_the_function_that_made_wrong_log_probs_is_named():
    seen = replace(GOOD, analysis=analysis(0.6, findings=[SHIFTED]))
    line = of(seen, "--custom-generate-function-path mine.generate")["sampled"]
    assert line.text.endswith("(run.sh:27: --custom-generate-function-path mine.generate)")


def test_log_probs_that_are_none_are_seen_where_the_run_ended_before_it_trained():
    for found, text in {
        None: "16 have no log-probs of the sampler, and 0 have values that are not log-probs",
        float("nan"): "0 have no log-probs of the sampler, and 16 have values that are not log-probs, such",
        -9999.0: "0 have no log-probs of the sampler, and 16 have values that are not log-probs, such as",
    }.items():
        one = {**sample("1"), "rollout_log_probs": found and [found, -1.0]}
        seen = replace(GOOD, analysis=None, status=1, cause="TypeError", rollouts={0: [one] * 16})
        line = of(seen, "--use-tis --custom-generate-function-path mine.generate")["sampled"]
        assert line.state == "WRONG" and text in line.text and "mine.generate" in line.text
        plain = replace(seen, events=without("parsed", use_tis=False).events, status=0)
        assert (of(plain)["sampled"].state == "ok") == (found is None)


def test_what_nobody_asked_for_is_not_wrong():
    plain = replace(without("parsed", use_tis=False, custom_tis_function_path=None))
    plain = replace(plain, events=tuple(e for e in plain.events if e["event"] != "function"))
    assert of(plain)["hook called"].state == "not asked for"
    alone = of(replace(GOOD, rollouts={}), "--debug-train-only")
    assert {alone[name].state for name in ("engine up", "weights pushed")} == {"not asked for"}


def test_a_failure_stands_on_the_first_line_that_was_not_reached():
    error = {
        "event": "function",
        "path": "planted.reward",
        "error": "KeyError: 'answer'",
        "at": "planted.py:3",
    }
    seen = Evidence(1, 50.0, Path("log"), "RayTaskError", (*GOOD.events[:3], error))
    found = of(seen, "--custom-rm-path planted.reward --use-tis")
    assert (
        found["sampled"].text
        == "run.sh:27: --custom-rm-path planted.reward: KeyError: 'answer' (planted.py:3)"
    )
    assert [x.state for x in found.values()] == ["ok"] * 4 + ["WRONG"] + ["not reached"] * 5
    found = of(replace(seen, events=(), cause="AssertionError: no"))
    assert (found["parsed"].state, found["parsed"].text) == ("WRONG", "AssertionError: no")
    found = of(replace(seen, events=GOOD.events[:2], status=124))
    assert found["model built"].text == "no answer for 50 s"


def test_a_run_that_fails_behind_its_last_line_is_wrong():
    assert (
        of(replace(GOOD, status=1, cause="ValueError: late"))["checkpoint written"].text == "ValueError: late"
    )


PAGE = """\
rehearsed in 61 s; the host's log: /out/log
  script     ok           3 flags
  trained    WRONG        not finite
  checkpoint not reached
not seen without a GPU
  memory
"""


@pytest.mark.parametrize("width", [100])
def test_the_page(width):
    lines = [
        ("script", "ok", "3 flags"),
        ("trained", "WRONG", "not finite"),
        ("checkpoint", "not reached", ""),
    ]
    text = io.StringIO()
    seen = Evidence(0, 61.4, Path("/out/log"))
    found = page([checks.PageLine(*line) for line in lines], ["memory"], seen)
    Console(file=text, width=width).print(found)
    assert [line.split() for line in text.getvalue().splitlines()] == [
        line.split() for line in PAGE.splitlines()
    ]


def test_what_cannot_be_seen_depends_on_what_was_replaced():
    account = {
        "model": "2 layers; without mixture of experts; one of bytes",
        "data": "not on this machine: 64",
    }
    found = checks.unseen(launch(), account)
    assert "mixture of experts" in found and "the model's tokenizer and chat template" in found
    assert any("keys, lengths, labels" in line for line in found)
    assert len(checks.unseen(launch(), {"model": "2 layers", "data": "first 64 rows"})) == len(found) - 3


def test_a_host_that_was_killed_is_said_so_whatever_was_recorded():
    killed = replace(
        GOOD,
        status=-9,
        cause="the host was killed by SIGKILL",
        events=({"event": "function", "path": PATH, "error": "KeyError: 1", "at": "a.py:1"},),
    )
    wrong = [line for line in checks.lines(launch(f"--x-path {PATH}"), killed) if line.state == checks.WRONG]
    assert [(line.name, line.text) for line in wrong] == [("parsed", "the host was killed by SIGKILL")]

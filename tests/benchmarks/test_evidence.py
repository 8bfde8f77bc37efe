"""Which runs there are, how they are judged, and what is made of their lines."""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib.image import imread

from benchmarks.evidence import __main__ as evidence
from benchmarks.evidence import judge, pages, picture, pooled, reward, rows, runs, settings, table
from benchmarks.evidence.rows import Row
from slime_ext.config.files import read_mapping
from slime_ext.config.load import read_config
from slime_ext.errors import ConfigError
from slime_ext.tools.analysis import evidence as measured
from slime_ext_cpu.tasks import sums

OF = settings.read()
COUNTED = {24: "twenty-four", 26: "twenty-six"}


def row(arm="B", seed=1, end=0.9, curve=None, panel="lag", **more):
    heldout = curve or [(0, 0.0), (100, end / 2), (256, end)]
    fields = {"settings": OF.digest(panel, arm), "commit": "c", "versions": {"torch": "2"}, "seconds": 1.0}
    return Row(panel=panel, arm=arm, seed=seed, heldout=heldout, end=heldout[-1][1], **{**fields, **more})


def cell(arm, ends):
    return [
        row(arm, seed, end, recommended="token_is" if arm == "B" else None)
        for seed, end in enumerate(ends, 1)
    ]


def verdicts(*lines):
    return judge.judge(table.by_arm(OF, "lag", itertools.chain(*lines)), OF.judged)


def words_of(panel, arm, seed=3, recommended=None):
    words, environment = runs.command(OF, panel, arm, seed, recommended)
    at = words.index("--")
    return words[:at], words[at:], environment


def rate_of(hosts):
    return float(hosts[hosts.index("--lr") + 1])


def test_a_run_is_a_line_of_slime_ext_train_with_the_flags_of_the_host_behind_it():
    ours, hosts, environment = words_of("lm_lag", "C")
    assert ours[:3] == ["train", "--host", "miles"] and environment == {}
    found = dict(zip(ours[1::2], ours[2::2], strict=True))
    lag = str(OF.panels["lm_lag"].mismatch["lag"])
    assert (found["--correction"], found["--lag"], found["--seed"]) == ("token_tis", lag, "3")
    assert hosts[0] == "--" and rate_of(hosts) == OF.panels["lm_lag"].flags["lr"]
    assert not {"--use-tis", "--rollout-seed", "--custom-tis-function-path"} & {*ours, *hosts}


def test_arms_of_a_host_differ_from_the_uncorrected_one_in_what_they_say():
    b, hosts, _ = words_of("lm_lag", "B")
    assert b[b.index("--correction") + 1] == "metrics_only"
    a = words_of("lm_lag", "A")[0]
    place = b.index("--lag")
    assert a == b[:place] + b[place + 2 :]
    s = words_of("lm_lag", "S")[0]
    assert (
        read_config(read_mapping(s[s.index("--correction") + 1])["slime_ext"]).correction.center.top_k == 128
    )
    assert words_of("lm_lag", "G", recommended="icepop")[0] == words_of("lm_lag", "E")[0]
    slow = words_of("lm_lag", "F")
    assert slow[0] == b and rate_of(slow[1]) == rate_of(hosts) / 4
    assert words_of("lm_int4", "B")[2] == {"SLIME_EXT_ROUND": "int4"} and words_of("lm_int4", "A")[2] == {}
    assert list(runs._words({"eps_clip": 0.2, "balance_data": True, "betas": [1, 2]})) == [
        *("--eps-clip", "0.2", "--balance-data", "--betas", "1", "2")
    ]


STAND_IN = """
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
if words[0] == "analyze":
    effects = [{"name": "seq_is", "tokens": 8, "kept_tokens": 6, "ess": 0.25}]
    effects += [{"name": "m2", "tokens": 0, "kept_tokens": 0, "ess": None}]
    document = {"recommendation": {"name": "cispo"}, "effects": effects}
    Path(words[words.index("--json") + 1]).write_text(json.dumps(document))
    sys.exit()
out = Path(words[words.index("--out") + 1])
with (out.parents[1] / "words.txt").open("a") as file:
    file.write(" ".join(words) + chr(10))
K3, ESS = "train/off_policy/k3_kl", "train/off_policy/ess_weight"
(out / "dump").mkdir(parents=True)
LOGGED = {"train/grad_norm": 2.00004, "rollout/advantages": -0.5, "train/off_policy/perplexity_behavior": 4.0}
rows = [{"rollout": -1, "eval/heldout": 0.04}, {"rollout": 0, K3: 0.01, ESS: 0.9, **LOGGED}]
rows += [{"rollout": 1, K3: 0.03, ESS: 0.7, "eval/heldout": 0.5}, {"rollout": 2, K3: 0.02, ESS: 0.8}]
if os.environ.get("SLIME_EXT_SCORE") == "both":
    rows[0]["trained_eval/heldout"], rows[2]["trained_eval/heldout"] = 0.06, 0.75
(out / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
if "13" in words:
    sys.exit("step 7: expected finite gradients, got NaN")
if "14" in words:
    sys.exit("no space left on device")
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """`runs.run` on a stand-in for slime-ext; its arm and seed are given."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    start = subprocess.run

    def instead(command, **kwargs):
        if "slime_ext.tools.commands.cli" in command:
            command = [sys.executable, str(tmp_path / "stand_in.py"), *command[3:]]
        return start(command, **kwargs)

    monkeypatch.setattr(runs.subprocess, "run", instead)
    monkeypatch.setattr(runs, "versions", lambda: {"torch": "2"})
    return lambda arm, seed, done=(), panel="lm_lag", **more: runs.run(
        OF, panel, arm, seed, tmp_path / "out", list(done), **more
    )


def test_a_run_becomes_its_line(train, tmp_path):
    b = train("B", 1)
    assert b.heldout == [(0, 0.04), (2, 0.5)] and b.end == 0.5 and b.stopped is None
    assert (b.k3, b.ess, b.recommended) == (0.02, 0.8, "cispo")
    assert b.effects == {"seq_is": (0.75, 0.25)} and train("C", 1).effects is None
    first = {"rollout": 0, "k3": 0.01, "ess": 0.9, "grad_norm": 2.0, "advantage_mean": -0.5, "entropy": 1.386}
    assert b.rollouts[:2] == [{"rollout": -1, "heldout": 0.04}, first] and len(b.rollouts) == 4
    folder = tmp_path / "out/lm_lag" / f"B-1-{OF.digest('lm_lag', 'B')}"
    left = {path.name for path in folder.iterdir()}
    assert "dump" not in left and "metrics.jsonl" in left
    train("B", 1, keep=True)
    assert (folder / "dump").is_dir()
    assert train("G", 1, [b]).recommended == "cispo" and train("C", 1).recommended is None
    assert train("C", 13).stopped.startswith("step 7: expected finite") and train("C", 13).end == 0.0
    with pytest.raises(ConfigError, match=r"C-14-\w+: expected the run to end, got: no space left on device"):
        train("C", 14)


def test_a_run_that_is_scored_twice_has_both_curves(train):
    both, one = train("B", 1, panel="lm_int4_both"), train("B", 1)
    assert both.heldout == one.heldout == [(0, 0.04), (2, 0.5)] and one.heldout_trained is None
    assert both.heldout_trained == [(0, 0.06), (2, 0.75)] and both.rollouts[2]["heldout_trained"] == 0.75
    found = [both.scored(whose) for whose in ("served", "trained", "trained less served")]
    assert found == [0.5, 0.75, 0.25] and one.scored("trained") is None


def test_a_cell_is_an_arm_with_one_variant_of_its_panel(train):
    panel = OF.panels["lm_dose"]
    assert panel.cells == ("B@lag1", "C@lag1", "B@lag2", "C@lag2", "B@lag8", "C@lag8")
    *words, computing = words_of("lm_dose", "B@lag1")
    assert words == [*words_of("lm_lag", "A")][:2]  # nothing lags, nothing is rounded
    assert computing == {"SLIME_EXT_BFLOAT16": "float32"}
    lagging = words_of("lm_dose", "C@lag8")[0]
    assert lagging[lagging.index("--lag") + 1] == "8"
    rounded = {"SLIME_EXT_ROUND": "int8", "SLIME_EXT_SCORE": "both"}
    assert words_of("lm_dose_int8", "C")[2] == {**rounded, **computing}
    assert rate_of(words_of("lm_rate_all", "U@3e-5")[1]) == 3e-5
    assert "4" in words_of("lm_steps", "P")[1] and "ppo_is_bypass" in words_of("lm_steps", "P")[0]
    digests = {OF.digest("lm_rate_all", cell) for cell in OF.panels["lm_rate_all"].cells}
    assert len(digests) == 15
    assert OF.digest("lm_rate_all", "S@6e-5") == OF.digest("lm_lag", "S")
    assert OF.digest("lm_rate_all", "B@1.5e-5") == OF.digest("lm_lag", "F")
    assert panel.asked(["C"]) == [f"C@{name}" for name in panel.variants]
    assert panel.asked(["B@lag8"]) == ["B@lag8"]
    assert OF.panels["lm_int4"].asked(["F"]) == ["F"]  # a pilot of an arm that the panel lacks
    assert OF.with_tried("lm_rate_all", {"lr": 1e-4}).flags("lm_rate_all", "C@3e-5", 1)["lr"] == 1e-4
    made = train("B@lag8", 41, panel="lm_dose")
    assert (made.arm, made.settings, made.recommended) == ("B@lag8", OF.digest("lm_dose", "B@lag8"), "cispo")


def test_runs_that_a_panel_shares_with_another_are_not_run_again():
    lines = rows.read()
    cells = OF.panels["lm_rate_all"].cells
    lines = [line for line in lines if not line.panel.startswith("lm_rate")]
    left = list(runs.missing(OF, "lm_rate_all", list(cells), list(OF.panels["lm_rate_all"].seeds), lines))
    there = {"A@6e-5", "B@6e-5", "C@6e-5", "S@6e-5", "B@1.5e-5"}
    assert {cell for cell, _ in left} == {*cells} - there and len(left) == 80
    of_two = runs.missing(OF, "lm_rate", list(OF.panels["lm_rate"].cells), [1], lines)
    assert list(of_two) == [("U@6e-5", 1), ("B@3e-5", 1), ("U@3e-5", 1), ("U@1.5e-5", 1)]
    of_rate = table.by_arm(OF, "lm_rate_all", [*lines, row("U@6e-5", 1, panel="lm_rate_all")])
    assert of_rate["B@1.5e-5"][3].arm == "F" and next(iter(of_rate)) == "A@6e-5"


def test_a_panel_without_a_date_runs_no_test_seed(monkeypatch, capsys):
    undated = OF.with_tried("lm_long", {"lr": 6e-5})  # a pilot of the same settings
    monkeypatch.setattr(settings, "read", lambda: undated)
    monkeypatch.setattr(runs, "run", None)  # nothing may run
    assert evidence.main(["run", "lm_long"]) == 2
    assert "lm_long: frozen: expected a date before test seeds run" in capsys.readouterr().err
    assert evidence.main(["run", "lm_long", "--arms", "BB"]) == 2
    assert "--arms: expected a known arm, got 'BB'" in capsys.readouterr().err


def test_a_panel_asks_the_tasks_sums_in_its_own_form(train, tmp_path):
    train("B", 1)
    words = (tmp_path / "out/words.txt").read_text().split()
    file, form = Path(words[words.index("--prompt-data") + 1]), OF.panels["lm_lag"].flags["prompt"]
    heldout = words[words.index("--eval-prompt-data") + 1 :][:2]
    assert heldout == ["heldout", str(file.with_name("heldout.jsonl"))] and "--prompt" not in words
    asked = [json.loads(line) for name in (file, heldout[1]) for line in Path(name).read_text().splitlines()]
    assert len(asked) == sums.TRAIN + sums.HELDOUT == len({row["input"] for row in asked})
    flags = {name: value for name, value in OF.panels["lm_lag"].flags.items() if name != "prompt"}
    plain = OF.panels["lm_lag"].model_copy(update={"flags": flags})
    runs.write_prompts_of(OF.model_copy(update={"panels": {"plain": plain}}), "plain", tmp_path / "plain")
    assert json.loads((tmp_path / "plain/heldout.jsonl").read_text().splitlines()[0]) == sums.prompts()[1][0]
    few = plain.model_copy(update={"flags": flags | {runs.ASKED: 3}})
    runs.write_prompts_of(OF.model_copy(update={"panels": {"few": few}}), "few", tmp_path / "few")
    assert len((tmp_path / "few/heldout.jsonl").read_text().splitlines()) == 3
    for row in asked:
        a, b = map(int, re.findall(r"\d+", row["input"])[-2:])
        assert row == {"input": form.replace("{a}", str(a)).replace("{b}", str(b)), "label": str(a + b)}


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        (" 1948, 1949, 1951, 1952", 2 / 16),
        (" 1949, 1950", 0.0),
        ("", 0.0),
        (", ".join(str(1948 + i) for i in range(16)) + ", 7", 1.0),
        (", ".join(str(1948 + i) for i in range(18)), 1.0),
        (" 1948 and 1949.1950", 3 / 16),
    ],
)
def test_a_long_answer_earns_what_it_counts_in_a_row(answer, share):
    sample = argparse.Namespace(prompt="2197, 2198. 1947,", response=answer)
    assert asyncio.run(reward.counted(argparse.Namespace(), sample)) == share


def test_versions_are_those_of_this_environment():
    found = runs.versions()
    assert found.keys() == {"python", *runs.COMPUTE} and found["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLIME_EXT_BFLOAT16", "float32"), ("SLIME_EXT_ROUND", "int4"), ("SLIME_EXT_SCORE", "both")],
)
def test_a_run_that_computes_otherwise_than_its_panel_is_refused(monkeypatch, name, value):
    """A variable from outside; what the settings ask for is set for each run alone."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}: expected unset, got a value: unset it"):
        runs.refuse(OF, "lm_lag", [101], [])


def test_what_cannot_run_is_refused(capsys):
    with pytest.raises(
        ConfigError, match="panels: lag: expected a panel with a host, got one of the training"
    ):
        runs.refuse(OF, "lag", [1], [])
    assert evidence.main(["run", "lag"]) == 2
    assert capsys.readouterr().err.startswith("settings.yaml: panels: lag: expected a panel with a host")


def test_nothing_runs_twice_and_seeds_are_kept_together():
    done = [row("B", 1), row("A", 1), row("B", 2)]
    left = list(runs.missing(OF, "lag", ["B", "A"], [1, 2, 3], done))
    assert left == [("A", 2), ("B", 3), ("A", 3)]
    assert rows.read() == rows.read() and not [k for k, n in _counts(rows.read()).items() if n > 1]


def test_a_run_with_the_words_of_another_is_not_run_but_has_its_line():
    b = row("B", 1, panel="lm_lag", recommended="token_tis")
    c, a = (row(arm, 1, panel="lm_lag") for arm in "CA")
    left = functools.partial(runs.missing, OF, "lm_lag", ["C", "G"], [1, 2])
    assert list(left([b])) == [("C", 1), ("G", 1), ("C", 2), ("G", 2)]
    assert list(left([b, c])) == [("C", 2), ("G", 2)]
    done = [b]
    to_run = left(done)
    assert next(to_run) == ("C", 1)
    done.append(c)  # as a run ends, before the next is asked for
    assert next(to_run) == ("C", 2)
    cells = table.by_arm(OF, "lm_lag", [b, c, a])
    assert cells["G"] == cells["C"] == {1: c} and "D" not in cells
    said = list(table._shared("lm_lag", cells))
    assert said == ["The same runs, so no further evidence: G is C (seeds 1)."]
    assert list(table.own(cells)) == ["A", "B", "C"]
    unsure = row("B", 1, panel="lm_lag", recommended="metrics_only")
    assert table.by_arm(OF, "lm_lag", [unsure, c])["G"] == {1: unsure}
    own = row("G", 1, panel="lm_lag")
    assert table.by_arm(OF, "lm_lag", [b, c, own])["G"] == {1: own}
    assert runs.line_of(OF, "lm_lag", "B", 1, [own]) is None  # its flags without a recommendation are B's
    other = OF.panels["lm_lag"].model_copy(update={"mismatch": {"rounding": "int8"}})
    two = OF.model_copy(update={"panels": OF.panels | {"other": other}})
    assert runs.line_of(two, "other", "A", 1, [a]) == a and runs.line_of(two, "other", "B", 1, [b]) is None
    assert runs.line_of(OF, "lag_again", "A", 9, [row("A", 9)]) is None  # nothing runs there


def test_a_run_can_be_run_again_beside_its_line(train, tmp_path, monkeypatch):
    """Of a committed line; its run is the stand-in's."""
    monkeypatch.setattr(rows, "AGAIN", tmp_path / "again.jsonl")
    words = ["run", "lm_lag", "--arms", "C", "--out", str(tmp_path / "out"), "--seeds", "1"]
    assert evidence.main(words) == 0 and not (tmp_path / "out").exists()
    assert evidence.main([*words, "103", "--again"]) == 0 and len(rows.read(rows.AGAIN)) == 1  # 103 has none
    assert evidence.main([*words[:-1], "103", "--again"]) == 2 and len(rows.read(rows.AGAIN)) == 1
    first = row("C", 1, curve=[(0, 0.1), (16, 0.7)], panel="lm_lag")
    (said,) = table.repeated({"C": {1: first}}, rows.read(rows.AGAIN))
    assert said.endswith("| C 1 | 0.100 0.700 | 0.040 0.500 |")
    assert not list(table.repeated({}, []))


def _counts(lines):
    keys = [line.key for line in lines]
    return {key: keys.count(key) for key in keys}


def test_test_seeds_wait_for_frozen_settings_and_these_stay():
    def dated(date):
        panel = OF.panels["lm_lag"].model_copy(update={"frozen": date})
        return OF.model_copy(update={"panels": {"lm_lag": panel}})

    ran = functools.partial(row, "B", 1, panel="lm_lag")
    with pytest.raises(ConfigError, match="frozen: expected a date before test seeds run, got none"):
        runs.refuse(dated(None), "lm_lag", [1], [])
    runs.refuse(dated(None), "lm_lag", [101], [])
    frozen = dated(yaml.safe_load("2026-01-01"))
    runs.refuse(frozen, "lm_lag", [1], [ran()])
    runs.refuse(
        OF.with_tried("lm_lag", {"lag": 2}), "lm_lag", [101], [ran()]
    )  # a pilot beside a panel's lines
    with pytest.raises(ConfigError, match="expected the settings 000000000000 of B seed 1's line"):
        runs.refuse(frozen, "lm_lag", [1], [ran(settings="000000000000")])


def test_a_pilot_tries_other_settings_and_is_never_a_test_run(capsys):
    assert OF.with_tried("lm_lag", {}) == OF and OF.panels["lm_lag"].frozen  # so that test seeds can run
    tried = OF.with_tried("lm_lag", {"lag": 4, "num_steps_per_rollout": 2})
    assert tried.panels["lm_lag"].mismatch["lag"] == 4 and "lag" not in tried.panels["lm_lag"].flags
    assert tried.flags("lm_lag", "A", 101)["num_steps_per_rollout"] == 2
    assert tried.digest("lm_lag", "B") != OF.digest("lm_lag", "B") and tried.panels["lm_lag"].frozen is None
    words = [
        "run",
        "lm_lag",
        "--arms",
        "B",
        "--seeds",
        "1",
        "--try",
        "lag=4",
        "lr=5e-5",
        "lr_decay_style=linear",
    ]
    assert evidence.main(words) == 2
    assert "lm_lag: frozen: expected a date before test seeds run, got none" in capsys.readouterr().err
    lines = [row(arm, 101, panel="lm_lag", tried={"lag": 4}) for arm in "AB"]
    assert "| lm_lag | lag 4 | 101 | 0.90, 0.90 | 0.90, 0.90 |" in table.pilots(lines)


def test_committed_lines_are_of_the_settings_that_are_there():
    for line in rows.read():
        assert line.settings == OF.digest(line.panel, line.arm), line.key


def test_the_followers_recommendation_is_that_of_the_same_seed():
    done = [row("B", 1, recommended="cispo"), row("B", 2, recommended="token_is")]
    assert runs._recommended(OF, "lag", "G", 2, done) == "token_is"
    assert runs._recommended(OF, "lag", "C", 2, done) is None
    with pytest.raises(ConfigError, match="expected B's line before it"):
        runs._recommended(OF, "lag", "G", 3, done)


@pytest.mark.parametrize(
    ("curve", "collapsed"),
    [
        ([(0, 0.0), (100, 0.8), (116, 0.3), (132, 0.3), (148, 0.9)], False),  # back after 16 steps and 32
        ([(0, 0.0), (100, 0.8), (116, 0.41), (148, 0.41)], False),  # above half
        ([(0, 0.0), (100, 0.8), (116, 0.3), (136, 0.39), (200, 0.9)], True),
        ([(0, 0.0), (50, 0.02), (70, 0.0), (100, 0.0), (256, 0.9)], False),  # two of 128 answers, no peak
        ([(0, 0.0), (100, 0.1), (256, 0.17)], True),  # never above a fifth of A's 0.9
        ([(0, 0.0), (100, 0.1), (256, 0.19)], False),
    ],
)
def test_collapse_is_what_the_settings_say(curve, collapsed):
    if curve[-1] == (148, 0.9):
        curve = [*curve[:3], (131, 0.9), curve[-1]]  # below for fewer than 20 steps
    found = verdicts([row("A", 1, 0.9)], [row("B", 1, curve=curve)])
    assert found["B"].collapsed == ([1] if collapsed else [])


def test_a_run_that_diverged_has_collapsed_and_failed():
    found = verdicts([row("A")], [row("B", stopped="the weights have diverged")])
    assert found["B"].collapsed == found["B"].failed == [1]


def test_failed_and_rescued_are_measured_against_the_exact_sampler_of_the_same_seed():
    found = verdicts(cell("A", [0.9, 0.8, 1.0]), cell("B", [0.69, 0.61, 0.96]), cell("C", [0.86, 0.7, 0.951]))
    assert found["B"].failed == [1] and found["B"].rescued == [3]
    assert found["C"].failed == [] and found["C"].rescued == [1, 3]
    assert found["B"].gap[0] == pytest.approx((-0.21 - 0.19 - 0.04) / 3)
    assert found["A"].gap == (0.0, 0.0, 0.0) and found["B"].p is None


def test_the_gain_is_measured_against_the_uncorrected_run_of_the_same_seed():
    found = verdicts(cell("B", [0.1, 0.4, 0.5]), [row("C", 3, 0.4), row("C", 1, 0.7), row("C", 4, 0.9)])
    assert found["C"].gain[0] == pytest.approx((0.6 - 0.1) / 2) and found["C"].gap is None
    assert found["C"].gain[1:] == pytest.approx((-0.1, 0.6)) and found["B"].gain == (0.0, 0.0, 0.0)


def test_fishers_test_is_that_of_the_hypergeometric_distribution_by_counting():
    """All ways to deal the outcomes to two groups, counted one by one."""
    for of_a, of_b in ((4, 4), (3, 5), (1, 6)):
        for a, b in itertools.product(range(of_a + 1), range(of_b + 1)):
            deals = list(itertools.combinations(range(of_a + of_b), a + b))
            of_first = [sum(place < of_a for place in deal) for deal in deals]
            count = {x: of_first.count(x) for x in set(of_first)}
            wanted = sum(n for n in count.values() if n <= count[a]) / len(deals)
            assert judge.fisher(a, of_a, b, of_b) == pytest.approx(wanted, abs=1e-12)
    assert judge.fisher(0, 8, 8, 8) == pytest.approx(2 / 12870)


def test_ends_of_the_same_seeds_are_compared_by_counting_signs():
    draw = random.Random(1)
    for n in (1, 3, 8):
        differences = [draw.uniform(-0.2, 0.5) for _ in range(n)]
        signs = list(itertools.product((1, -1), repeat=n))
        sums = [abs(sum(s * abs(d) for s, d in zip(chosen, differences, strict=True))) for chosen in signs]
        wanted = sum(found >= abs(sum(differences)) - 1e-12 for found in sums) / len(signs)
        assert judge.randomised(differences) == pytest.approx(wanted, abs=1e-12)
    shares = [[5, 3, 2, 8, -1, 6, -4, 7], [5, 5, -3, 2, 0, 9, 4, -4], [1, 2, 3, 4, 5, 6, 7, -8]]
    for of_128 in shares:  # recorded with four decimals, their sums tie as the shares do
        signs = list(itertools.product((1, -1), repeat=8))
        far = sum(abs(sum(map(int.__mul__, of_128, chosen))) >= abs(sum(of_128)) for chosen in signs)
        recorded = [round((64 + share) / 128, 4) - 0.5 for share in of_128]
        assert judge.randomised(recorded) == far / 256
    assert judge.randomised([0.1] * 8) == 2 / 256 and judge.randomised([]) == judge.randomised([0.0]) == 1.0
    ends = {"A": [0.6, 0.7, 0.8, 0.9], "B": [0.5, 0.5, 0.7, 0.7], "C": [0.6, 0.4, 0.8, 0.6]}
    lines = [
        row(arm, seed, end, panel="lm_lag_again")
        for arm, of_arm in ends.items()
        for seed, end in enumerate(of_arm, 9)
    ]
    found = table.verdicts(OF, "lm_lag_again", table.by_arm(OF, "lm_lag_again", lines))
    assert (found["A"].p, found["B"].p, found["C"].p) == (2 * 2 / 16, None, 1.0)  # Holm: two comparisons
    assert OF.panels["lm_lag"].test == "failed seeds"


def test_the_primary_comparison_is_of_two_arms_and_waits_for_all_seeds():
    panel = OF.panels["lm_cap"]
    assert (panel.primary.arm, panel.primary.against) == ("S", "U")

    def lines(gaps):
        pairs = zip(panel.seeds, gaps, strict=False)
        return [row(a, n, 0.5 + g, panel="lm_cap") for n, gap in pairs for a, g in (("S", gap), ("U", 0.0))]

    def said(gaps):
        return table.primary(OF, panel, panel.primary, table.by_arm(OF, "lm_cap", lines(gaps)))

    assert said([0.1] * 15) == "Primary comparison, ends of S - U: 1 of 16 seeds have not run."
    assert said([0.1] * 16).endswith(
        "S - U: 0.100 [0.100, 0.100], p 3.1e-05; not shown to be equal within 0.05 (90% interval)."
    )
    assert "p 0.8;" in said([0.02, -0.018] * 8) and "; equal within 0.05" in said([0.02, -0.018] * 8)
    assert "not shown" in said([0.09, -0.01] * 8)  # a mean of 0.04: the interval reaches beyond the margin
    for seeds in (15, 16):  # nothing is concluded from a panel whose primary comparison is not complete
        of_panel = table.by_arm(OF, "lm_cap", lines([0.1] * seeds))
        assert table.is_shown(OF, "lm_cap", of_panel) == (seeds == 16)


def test_the_best_of_several_cells_is_chosen_by_the_other_seeds():
    """Against plain loops on random ends; the seed's own end never counts."""
    draw = random.Random(3)
    own_end_would_count = 0
    for n, cells in ((2, 2), (5, 3), (8, 9)) * 20:
        ends = [[draw.choice([0.1, 0.2, 0.3, 0.4]) for _ in range(n)] for _ in range(cells)]
        lines = {f"S@{c}": {s: row("S", s, ends[c][s]) for s in range(n)} for c in range(cells)}
        found = judge.best_of(lines, list(lines))
        for seed in range(n):
            best, highest = None, None
            for c in range(cells):
                total = 0.0
                for other in range(n):
                    if other != seed:
                        total += ends[c][other]
                if highest is None or total > highest + 1e-12:
                    best, highest = c, total
            assert found[seed] == ends[best][seed]
            own_end_would_count += found[seed] != max(ends, key=sum)[seed]
    assert own_end_would_count > 20
    lines["S@0"].pop(3)
    assert 3 not in judge.best_of(lines, list(lines)) and judge.best_of(lines, []) == {}


def test_learning_rates_are_compared_each_at_its_best():
    panel, ends = (
        OF.panels["lm_rate_all"],
        {"C@6e-5": 0.4, "C@3e-5": 0.5, "U@3e-5": 0.6, "B@3e-5": 0.4, "B@6e-5": 0.3},
    )
    lines = [
        row(cell, seed, ends.get(cell, 0.2), panel="lm_rate_all")
        for cell in panel.cells
        for seed in panel.seeds
    ]
    found = judge.compare(table.by_arm(OF, "lm_rate_all", lines), panel.primary, OF.judged)
    assert found.difference == pytest.approx((0.2, 0.2, 0.2)) and (found.seeds, found.p) == (8, 2 / 256)
    said = table.primary(OF, panel, panel.primary, table.by_arm(OF, "lm_rate_all", lines))
    assert "best of C@6e-5 S@6e-5 U@6e-5" in said and "- best of B@6e-5 B@3e-5 B@1.5e-5 (chosen by" in said
    short = table.by_arm(OF, "lm_rate_all", lines[:-1])  # without A, which is not compared
    assert "have not run" not in table.primary(OF, panel, panel.primary, short)
    verdict = judge.judge(table.by_arm(OF, "lm_rate_all", lines), OF.judged, by_ends=True)["U@3e-5"]
    assert verdict.gain[0] == pytest.approx(0.2) and verdict.gap[0] == pytest.approx(0.4)  # of the same rate


def test_a_served_policy_and_the_trainers_are_compared_by_their_difference():
    panel = OF.panels["lm_int4_both"]

    def scored(arm, seed, served, trained):
        return row(arm, seed, served, panel="lm_int4_both", heldout_trained=[(16, trained)])

    lines = [scored("B", s, 0.5, 0.5) for s in panel.seeds] + [scored("C", s, 0.4, 0.6) for s in panel.seeds]
    found = judge.compare(table.by_arm(OF, "lm_int4_both", lines), panel.primary, OF.judged)
    assert found.difference[0] == pytest.approx(0.2)  # (C - B) trained is 0.1, served -0.1
    said = table.primary(OF, panel, panel.primary, table.by_arm(OF, "lm_int4_both", lines))
    assert said.startswith(
        "Primary comparison, ends of C - B, scored with the weights trained less served: 0.200"
    )
    served, trained = (
        pooled.evidence(OF.model_copy(update={"conditions": {name: OF.conditions[name]}}), lines)[
            "conditions"
        ]
        for name in ("int4_served", "int4_trained")
    )
    assert served[0]["remedies"][0]["effect"] == pytest.approx(-0.1)
    assert trained[0]["remedies"][0]["effect"] == pytest.approx(0.1)
    assert served[0]["remedies"][0]["planned"] and not trained[0]["remedies"][0]["planned"]
    assert trained[0]["post_hoc"] and trained[0]["panels"] == ["lm_int4_both"]
    without = [line.model_copy(update={"heldout_trained": None}) for line in lines]
    said = table.primary(OF, panel, panel.primary, table.by_arm(OF, "lm_int4_both", without))
    assert said.endswith("the trainer's weights were not scored.")


def test_the_slope_on_log_k3_is_that_of_plain_loops_within_seeds():
    draw, panel = random.Random(4), OF.panels["lm_dose"]
    lines, above, below = [], [], []
    for seed in panel.seeds:
        own, points = draw.uniform(0.1, 0.4), []
        for name in panel.variants:
            k3, noise = 10 ** draw.uniform(-3, 0), draw.uniform(-0.02, 0.02)
            gain = 0.05 * math.log(k3) + noise + own  # what the seed adds everywhere drops out
            lines.append(row(f"B@{name}", seed, 0.3, panel="lm_dose", k3=k3))
            lines.append(row(f"C@{name}", seed, 0.3 + gain, panel="lm_dose"))
            points.append((math.log(k3), gain))
        middle = sum(x for x, _ in points) / len(points)
        above.append(sum((x - middle) * y for x, y in points))
        below.append(sum((x - middle) ** 2 for x, _ in points))
    found = judge.sloped(table.by_arm(OF, "lm_dose", lines), "C", "B", OF.judged)
    assert (found.seeds, found.runs) == (8, 24)
    assert found.slope[0] == pytest.approx(sum(above) / sum(below)) == pytest.approx(0.05, abs=0.01)
    assert found.slope[1] < found.slope[0] < found.slope[2] and found.slope[2] - found.slope[1] < 0.03
    turned = [
        abs(sum(s * a for s, a in zip(signs, above, strict=True)))
        for signs in itertools.product((1, -1), repeat=8)
    ]
    assert found.p == sum(one >= abs(sum(above)) - 1e-12 for one in turned) / 2**8
    assert judge.sloped(table.by_arm(OF, "lm_dose", lines), "S", "B", OF.judged) is None
    name = "Slope of C - B on log k3 of B, seeds as blocks"
    left = table.by_arm(OF, "lm_dose", lines[:-1])
    assert table.slope(OF, panel, panel.slope, left) == f"{name}: 1 of 48 runs are missing."
    assert not table.is_shown(OF, "lm_dose", left)
    complete = table.by_arm(OF, "lm_dose", lines)
    said = table.slope(OF, panel, panel.slope, complete)
    assert said.startswith(f"{name}: 0.05") and said.endswith("(24 pairs of runs, 8 seeds).")
    assert table.is_shown(OF, "lm_dose", complete)


def test_arms_u_and_x_differ_from_score_centering_in_cap_and_centering_alone():
    found = {}
    for arm in "SUX":
        file = words_of("lm_cap", arm)[0]
        found[arm] = read_mapping(file[file.index("--correction") + 1])
    steps = found["S"]["slime_ext"].pop("steps")
    center = found["S"]["slime_ext"].pop("center")
    assert found["U"]["slime_ext"].pop("steps") == steps[:1] and steps[1:] == [{"truncate": {"high": 2.0}}]
    assert found["X"]["slime_ext"].pop("center") == center
    assert found["X"] == found["S"] and {**found["S"]} == found["U"] | {
        "custom_generate_function_path": "slime_ext.host.generate"
    }
    assert words_of("lm_cap", "B") == words_of("lm_lag", "B")


def test_holm_multiplies_by_the_comparisons_that_are_left():
    assert judge.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_the_interval_of_the_mean_has_its_place_and_width():
    draw = random.Random(2)
    values = [draw.gauss(0.5, 0.1) for _ in range(400)]
    mean, low, high = judge.bootstrap(values, 2000)
    assert mean == pytest.approx(sum(values) / 400)
    # 1.96 x 0.1 / sqrt(400) = 0.0098 on each side; a fifth of it for the draw of values and resamples
    assert mean - low == pytest.approx(0.0098, rel=0.2) and high - mean == pytest.approx(0.0098, rel=0.2)


def test_the_tables_hold_every_seed_and_every_arm():
    lines = [*cell("A", [0.9] * 8), *cell("B", [0.1] * 8), *cell("C", [0.88] * 8), row("G", 2, 0.5)]
    lines.append(row("C", 101, 0.123))  # a pilot
    said = table.text(OF, lines)
    ends = "0.100 [0.100, 0.100] | -0.800 [-0.800, -0.800] | 0.000 [0.000, 0.000]"
    assert f"| B mismatch, uncorrected | 8 | 8 | 8 | 0 | {ends} |  |" in said
    ends = "0.880 [0.880, 0.880] | -0.020 [-0.020, -0.020] | 0.780 [0.780, 0.780]"
    assert f"| C token_tis | 8 | 0 | 0 | 8 | {ends} | 0.000466 |" in said
    assert "| G |  | 0.500 |" in said and "| 2 | token_is | 0.100 | 0.500 | A 0.900 |" in said
    assert "0.123" not in said


def test_what_each_correction_would_have_done_is_the_mean_of_the_seeds_that_have_it():
    first = row("B", 1, effects={"seq_is": (0.5, 0.1), "m2": (1.0, 1.0)})
    second = row("B", 2, effects={"seq_is": (1.0, 0.3)})
    (said,) = table.effects([first, second, row("B", 3)])
    assert said.splitlines()[0].startswith("| would have done, 2 seeds |")
    assert said.splitlines()[2:] == ["| seq_is | 75% | 0.20 |"]
    assert list(table.effects([row("B", 3)])) == []


PAGES = (pages.EVIDENCE, pages.RESULTS)


def test_the_committed_tables_are_those_of_the_committed_lines(tmp_path):
    for name in (pages.PACKAGE, *PAGES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        text = (settings.ROOT / name).read_text()
        former = text[text.index(pages.BEGIN) :].partition(pages.END)[0]
        (tmp_path / name).write_text(text.replace(former, f"{pages.BEGIN}former"))
    pages.write(OF, rows.read(), tmp_path)
    for name in (pages.PACKAGE, *PAGES):
        assert (tmp_path / name).read_text() == (settings.ROOT / name).read_text(), name


@functools.cache
def committed():
    """The lines of rows.jsonl, read without the code that makes the table."""
    return list(map(json.loads, rows.FILE.read_text().splitlines()))


def ends_of(panels, arm):
    """Seed -> end in rows.jsonl.

    A panel counts if the arm has run on all of its seeds. ``panel@variant`` has the lines of ``arm@variant``.
    """
    lines, ends = committed(), {}
    for name in panels:
        panel, at, variant = name.partition("@")
        wanted = panel, arm + at + variant
        of_panel = {line["seed"]: line["end"] for line in lines if (line["panel"], line["arm"]) == wanted}
        ends |= of_panel if of_panel.keys() >= {*OF.panels[panel].seeds} else {}
    return ends


SHARED = {  # condition and arm -> the panels and the arm whose runs they are
    ("int4", "A"): (["lm_lag"], "A"),  # A has no mismatch: one run for both panels
    ("lag", "H"): (["lm_rate@3e-5"], "B"),
    ("quarter_rate", "B"): (["lm_lag"], "F"),
    ("lag2", "A"): (["lm_dose@lag1"], "B"),
    ("lag8", "A"): (["lm_dose@lag1"], "B"),
    ("fp8_served", "A"): (["lm_dose@lag1"], "B"),  # scored once: its engine has the trainer's weights
    ("fp8_trained", "A"): (["lm_dose@lag1"], "B"),
    ("int8_served", "A"): (["lm_dose@lag1"], "B"),
    ("int8_trained", "A"): (["lm_dose@lag1"], "B"),
}


def test_the_packages_table_is_what_plain_arithmetic_makes_of_the_lines():
    made = yaml.safe_load((settings.ROOT / pages.PACKAGE).read_text())
    for condition in made["conditions"]:

        def ends(arm, condition=condition):
            if (key := (condition["name"], arm)) in SHARED:
                return ends_of(*SHARED[key])
            if condition["name"].endswith("_trained"):
                lines = [row for row in rows.read() if [row.panel] == condition["panels"] and row.arm == arm]
                return {row.seed: row.heldout_trained[-1][1] for row in lines}
            return ends_of(condition["panels"], arm)

        base = ends("B")
        assert condition["uncorrected"]["seeds"] == len(base)
        assert condition["uncorrected"]["end"] == pytest.approx(sum(base.values()) / len(base), abs=6e-5)
        arms = {arm for arm in OF.arms if ends(arm)} - {"B", "G"}
        assert {remedy["arm"] for remedy in condition["remedies"]} == arms  # every arm that ran
        for remedy in condition["remedies"]:
            of_arm = ends(remedy["arm"])
            gained = [of_arm[seed] - base[seed] for seed in of_arm if seed in base]
            assert remedy["seeds"] == len(gained) == len(of_arm)
            assert remedy["effect"] == pytest.approx(sum(gained) / len(gained), abs=6e-5)
            assert remedy["low"] <= remedy["effect"] <= remedy["high"]
        panels = [panel for panel in condition["panels"] if "@" not in panel]
        k3 = [line.k3 for line in rows.read() if line.panel in panels and line.arm == "B"]
        if k3:
            assert condition["k3"] == ([min(k3), max(k3)] if k3[0] is not None else [])


def test_conditions_pool_panels_that_differ_in_arms_and_seeds_alone():
    found = yaml.safe_load(settings.FILE.read_text())
    found["conditions"]["lag"]["panels"].append("lm_int4")
    with pytest.raises(ValueError, match="lag: expected panels that differ in arms and seeds alone"):
        settings.Settings.model_validate(found)


def test_a_condition_can_have_one_variant_of_a_panel():
    """At half the rate U is 0.2 above B, at a quarter 0.1 below; nothing is shown before the last run."""
    ends = {"B@6e-5": 0.3, "U@6e-5": 0.6, "B@3e-5": 0.5, "U@3e-5": 0.7, "B@1.5e-5": 0.5, "U@1.5e-5": 0.4}
    lines = [
        row(cell, seed, end, panel="lm_rate", k3=0.1) for cell, end in ends.items() for seed in range(1, 9)
    ]
    found = {one["name"]: one for one in pooled.evidence(OF, lines)["conditions"]}
    assert {*found} == {"lag", "half_rate", "quarter_rate"}
    without_cap, at_half = found["lag"]["remedies"]
    assert [without_cap["arm"], without_cap["effect"]] == pytest.approx(["U", 0.3])
    assert [at_half["arm"], at_half["effect"], at_half["preset"]] == pytest.approx(["H", 0.2, None])
    found["lag"]["remedies"] = [without_cap]
    for name, effect in {"lag": 0.3, "half_rate": 0.2, "quarter_rate": -0.1}.items():
        ((remedy,), uncorrected) = found[name]["remedies"], found[name]["uncorrected"]
        assert (remedy["arm"], remedy["seeds"], uncorrected["seeds"]) == ("U", 8, 8)
        assert remedy["effect"] == pytest.approx(effect)
        variant = {"lag": "6e-5", "half_rate": "3e-5", "quarter_rate": "1.5e-5"}[name]
        assert remedy["planned"] == {f"lm_rate@{variant}": 0.023}  # 2/256, after Holm over three rates
    assert pooled.evidence(OF, lines[:-1])["conditions"] == []
    as_lag = [row("B", 1, 0.2, panel="lm_lag"), *lines]
    assert pooled.lines_of(OF, "lag", as_lag)["B"][1].panel == "lm_rate"  # lm_lag has not all of its seeds


def test_uncorrected_runs_without_a_lag_are_the_exact_sampler_of_other_lags():
    ends = {"B@lag1": 0.6, "C@lag1": 0.6, "B@lag2": 0.5, "C@lag2": 0.4, "B@lag8": 0.1, "C@lag8": 0.3}
    seeds = OF.panels["lm_dose"].seeds
    lines = [row(cell, seed, end, panel="lm_dose", k3=0.1) for cell, end in ends.items() for seed in seeds]
    found = {one["name"]: one for one in pooled.evidence(OF, lines)["conditions"]}
    effects = {name: {r["arm"]: r["effect"] for r in one["remedies"]} for name, one in found.items()}
    assert effects == {"no_lag": {"C": 0.0}, "lag2": {"A": 0.1, "C": -0.1}, "lag8": {"A": 0.5, "C": 0.2}}
    assert found["lag8"]["remedies"][0]["planned"] == {}
    assert pooled.evidence(OF, lines[:-1])["conditions"] == []


def test_runs_without_rounding_are_the_exact_sampler_of_a_format_with_both_weights():
    """Rounding costs 0.1 with FP8, and nothing with the trainer's weights; token_tis loses 0.2 with both."""
    seeds, lines = OF.panels["lm_dose_fp8"].seeds, []
    for seed in seeds:
        for k3, lag in ((0.002, "lag1"), (0.1, "lag2"), (1.0, "lag8")):
            lines += [row(f"{arm}@{lag}", seed, 0.6, panel="lm_dose", k3=k3) for arm in "BC"]
        for arm, served, trained in (("B", 0.5, 0.6), ("C", 0.3, 0.4)):
            lines.append(row(arm, seed, served, panel="lm_dose_fp8", heldout_trained=[(16, trained)]))
    found = {one["name"]: one for one in pooled.evidence(OF, lines)["conditions"]}
    effects = {
        name: {r["arm"]: r["effect"] for r in found[name]["remedies"]}
        for name in ("fp8_served", "fp8_trained")
    }
    assert effects == {"fp8_served": {"A": 0.1, "C": -0.2}, "fp8_trained": {"A": 0.0, "C": -0.2}}
    said = table.text(OF, lines).partition("### lm_dose_fp8")[2].partition("###")[0]
    assert "Primary comparison, ends of C - B, scored with the weights trained: -0.200" in said


def test_pairs_are_of_the_seeds_that_both_arms_have_run():
    """Panels read as one: B and S on four seeds, C on two of them. E lacks a seed of its panel."""
    seeds = {"lm_lag": [1, 2], "lm_lag_again": [9, 10], "lm_lag_center": [9, 10]}
    small = {name: OF.panels[name].model_copy(update={"seeds": of_panel}) for name, of_panel in seeds.items()}
    of = OF.model_copy(update={"panels": OF.panels | small})
    ends = {"B": [0.1, 0.2, 0.3, 0.4], "S": [0.5, 0.5, 0.5, 0.5], "C": [0.2, 0.2]}
    second = {"B": "lm_lag_again", "S": "lm_lag_center"}
    lines = [
        row(arm, seed, end, panel="lm_lag" if seed < 3 else second[arm])
        for arm, of_arm in ends.items()
        for seed, end in zip((1, 2, 9, 10), of_arm, strict=False)
    ]
    lines.append(row("E", 1, 0.9, panel="lm_lag"))
    said = pooled.report(of, lines)
    assert "E" not in pooled.lines_of(of, "lag", lines)
    assert "| S - B | 4 | 0.250 [" in said and "| C - B | 2 | 0.050 [0.000, 0.100] | 1 |" in said
    assert "| C - S | 2 | -0.300 [-0.300, -0.300] | 0.5 |" in said


def test_slow_runs_are_those_that_are_low_halfway():
    curves = {1: [(4, 0.9), (8, 0.2), (16, 0.5)], 2: [(8, 0.1), (16, 0.2)], 3: [(8, 0.4), (16, 0.1)]}
    lines = {"B": {n: row("B", n, curve=c) for n, c in curves.items()}}
    lines["C"] = {3: row("C", 3, curve=curves[3])}
    assert pooled.slow(lines) == {"B": (2, pytest.approx(0.2))}


def test_the_picture_has_a_line_for_each_seed_and_one_for_the_mean():
    lines = [*cell("A", [0.9, 0.8]), *cell("B", [0.1, 0.2, 0.3])]
    figure = picture.draw(OF, {"lag": table.by_arm(OF, "lag", lines)})
    drawn = [ax for ax in figure.axes if ax.get_visible()]
    assert [len(ax.lines) for ax in drawn] == [3, 4]
    assert list(drawn[1].lines[-1].get_ydata()) == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.parametrize("rounded", [False, True])
def test_the_picture_of_gains_has_every_remedy(rounded):
    conditions = [c for c in measured.evidence().conditions if OF.is_language_model(c.name)]
    conditions = [c for c in conditions if c.name.startswith(("int", "fp8")) == rounded]
    (ax,) = picture.gains(OF, measured.evidence(), rows.read(), rounded=rounded).axes
    texts = [text.get_text() for text in ax.texts]
    assert len(texts) == len(conditions) + 2 * sum(len(condition.remedies) for condition in conditions)
    drawn = []
    for condition in conditions:
        (place,) = (
            i for i, text in enumerate(texts) if text.endswith(f"{condition.whose} (k3 {condition.range})")
        )
        beside = texts[place + 1 :][: 2 * len(condition.remedies)]
        pairs = list(zip(beside[::2], beside[1::2], strict=True))
        of = {(remedy.remedy, remedy.gain): remedy for remedy in condition.remedies}
        assert {*pairs} == {*of}
        drawn += [of[pair] for pair in pairs]
    *intervals, (left, right) = ([*line.get_xdata()] for line in ax.lines if line.get_marker() == "None")
    assert intervals == [[remedy.low, remedy.high] for remedy in drawn] and left == right == 0
    means = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D"]
    assert means == [remedy.effect for remedy in drawn]
    seeds = [[*line.get_xdata()] for line in ax.lines if line.get_marker() == "o"]
    assert list(map(len, seeds)) == [remedy.seeds for remedy in drawn]
    assert [sum(gained) / len(gained) for gained in seeds] == pytest.approx(means, abs=1e-4)
    assert all(-picture.GAINS < gain < picture.GAINS for gained in seeds for gain in gained)


def test_the_picture_of_the_ends_has_every_arm_and_seed():
    figure = picture.ends(OF, rows.read())
    made = yaml.safe_load((settings.ROOT / pages.PACKAGE).read_text())["conditions"]
    for ax, condition in zip(figure.axes, made, strict=False):
        names = {remedy["remedy"] for remedy in condition["remedies"]} | {"uncorrected"}
        assert {label.get_text() for label in ax.get_yticklabels()} == names
        dots = [line for line in ax.lines if line.get_marker() == "o"]
        seeds = sum(remedy["seeds"] for remedy in condition["remedies"])
        assert len(dots) == seeds + condition["uncorrected"]["seeds"]


def test_the_pictures_are_drawn(tmp_path):
    lines = [line for line in rows.read() if line.panel in ("lag", "lm_lag", "lm_int4", "lm_long")]
    picture.write(OF, lines, tmp_path)
    assert imread(tmp_path / "gains.png").shape[1] > 1000
    height, width = imread(tmp_path / "evidence.png").shape[:2]
    assert height <= 700 and width >= 1000 and imread(tmp_path / "evidence_all.png").shape[1] > 1000


def test_the_page_says_how_far_repeated_runs_were_apart():
    page = " ".join((settings.ROOT / pages.EVIDENCE).read_text().split())
    first = {(row.panel, row.arm, row.seed): row.end for row in rows.read()}
    again = [row for row in rows.read(rows.AGAIN) if row.panel.startswith("lm_")]
    apart = [row.end - first[row.panel, row.arm, row.seed] for row in again]
    rms = math.sqrt(sum(gap**2 for gap in apart) / len(apart))
    most = max(zip(apart, again, strict=True), key=lambda pair: abs(pair[0]))
    told = f"runs that were repeated with the same seed ended {rms:.2f} higher or lower"
    assert f"{COUNTED[len(apart)]} {told} (root mean square), and at most {abs(most[0]):.2f}." in page
    rounded, scored_twice = (table.by_arm(OF, name, rows.read()) for name in ("lm_int4", "lm_int4_both"))
    of_int4 = [gap for arm in "BCS" for gap in judge.gaps(rounded[arm], scored_twice[arm]).values()]
    noise = math.sqrt(sum(gap**2 for gap in of_int4) / len(of_int4))
    told = (
        f"24 runs of `lm_int4` ran again in `lm_int4_both`, with sums in another order, and ended {noise:.2f}"
    )
    assert len(of_int4) == 24 and f"{told} higher or lower, and at most {max(map(abs, of_int4)):.2f}." in page
    readme = " ".join((settings.ROOT / "README.md").read_text().split())
    assert f"repeated with its seed ends {rms:.2f} higher or lower (root mean square)" in readme
    assert (most[1].panel, most[1].arm, most[1].seed) == ("lm_cap", "C", 31)
    assert f"({first['lm_cap', 'C', 31]:.2f}, then {most[1].end:.2f})" in page


def test_the_results_say_how_many_runs_are_slow():
    lines = pooled.lines_of(OF, "lag", rows.read())
    slow, results = pooled.slow(lines), " ".join((settings.ROOT / pages.RESULTS).read_text().split())
    counts = [f"{slow[arm][0]} of {len(lines[arm])}" for arm in "BCASU"]
    page = " ".join((settings.ROOT / pages.EVIDENCE).read_text().split())
    gained = [f"{slow[arm][1]:.2f}" for arm in "CBA"]
    told = f"{counts[1]} score below 0.3, and by the end these have risen by only {gained[0]} in the mean."
    assert f"{told} Of uncorrected runs {counts[0]} do, and rise by {gained[1]}; of the exact" in page
    assert f"sampler {counts[2]}, and rise by {gained[2]}." in page
    told = "in {} uncorrected runs, in {} with `token_tis`, in {} with the exact sampler, in {} with score"
    assert told.format(*counts) in results and f"and in {counts[-1]} without a cap" in results


# The numbers of docs/evidence.md that stand in sentences, which are written by hand.


@pytest.fixture(scope="module")
def page():
    return " ".join((settings.ROOT / pages.EVIDENCE).read_text().split())


@pytest.fixture(scope="module")
def lag():
    return pooled.lines_of(OF, "lag", rows.read())


@pytest.fixture(scope="module")
def cap():
    return table.by_arm(OF, "lm_cap", rows.read())


def pair(one, other, of):
    return list(judge.gaps(of[one], of[other]).values())


def numbers(values):
    return judge.bootstrap(values, OF.judged.resamples)


def said(one, other, of):
    gaps = pair(one, other, of)
    return "{:+.2f} ({:.2f} to {:.2f}".format(*numbers(gaps)), f"p {judge.randomised(gaps):.2g})"


def planned(name):
    return judge.compare(table.by_arm(OF, name, rows.read()), OF.panels[name].primary, OF.judged)


def end(of_arm):
    return f"{sum(line.end for line in of_arm.values()) / len(of_arm):.2f}"


def test_the_page_says_what_the_learning_rate_does(page, lag):
    rate = table.by_arm(OF, "lm_rate", rows.read())
    of_arm = {
        arm: [end(rate[f"{arm}@{name}"]) for name in OF.panels["lm_rate"].variants] for arm in ("B", "U")
    }
    full, half, quarter = of_arm["B"]
    told = f"at {full} at the full rate, at {half} at half of it, and at {quarter} at a quarter"
    assert f"uncorrected runs end {told}" in page
    assert "`importance_sampling` ends at {}, {} and {}.".format(*of_arm["U"]) in page
    for arm, start in (("U", "at the full rate by "), ("C", "`token_tis` there by "), ("S", "there by ")):
        told, p = said("H", arm, lag)
        assert f"{start}{told.lstrip('+')}, {p}" in page
    found = planned("lm_rate")
    told = "minus uncorrected is {:+.2f} ({:.2f} to {:.2f}, p {:.2g}, ".format(*found.difference, found.p)
    assert found.seeds == 8 and f"{told}planned in `lm_rate`)" in page and not found.equal
    capped, found = table.by_arm(OF, "lm_rate_tis", rows.read()), planned("lm_rate_tis")
    told = "`token_tis` minus uncorrected is {:+.2f} ({:.2f} to {:.2f}, p {:.2g}, planned in `lm_rate_tis`)"
    assert found.equal and told.format(*found.difference, found.p) in page
    exact, found = table.by_arm(OF, "lm_rate_exact", rows.read()), planned("lm_rate_exact")
    told = "costs {:.2f}** ({:.2f} to {:.2f}, p {:.2g}, planned in `lm_rate_exact`). The exact sampler ends"
    assert f"{told.format(*found.difference, found.p)} there at {end(exact['A'])}, above" in page
    assert sum(gap > 0 for gap in pair("A", "B", exact)) == 7 and not found.equal
    costs = {seed: row.end - lag["B"][seed].end for seed, row in lag["A"].items() if seed in exact["A"]}
    assert f"at the full rate the lag costs {sum(costs.values()) / len(costs):.2f} on these seeds" in page
    of_half = table.by_arm(OF, "lm_rate_all", rows.read())
    for name, cell in (
        ("`importance_sampling` is", "U@3e-5"),
        ("minus `token_tis`", "C@3e-5"),
        ("minus score centering", "S@3e-5"),
    ):
        told, p = said("A", "C", {"A": exact["A"], "C": of_half[cell]})
        assert f"{name} {told}, {p}" in page

    ends = [end(capped[f"C@{name}"]) for name in OF.panels["lm_rate"].variants]
    assert "`token_tis` ends at {}, {} and {}".format(*ends) in page
    above = [gap > 0 for gap in pair("A", "B", lag)]
    assert f"On {sum(above)} of {len(above)} seeds the exact sampler ends above" in page


def test_the_pages_say_what_the_best_of_three_corrections_gains(page):
    cells, found = table.by_arm(OF, "lm_rate_all", rows.read()), planned("lm_rate_all")
    told = "{:+.2f} ({:.2f} to {:.2f}, p {:.2g}, planned in `lm_rate_all`)".format(*found.difference, found.p)
    assert found.equal and f"best minus the best uncorrected run is {told}" in page
    readme = " ".join((settings.ROOT / "README.md").read_text().split())
    told = "as the other seeds choose it, found {:+.2f} ({:.2f} to {:.2f}, p {:.2g}, 8 seeds)"
    assert told.format(*found.difference, found.p) in readme
    gained = [
        sum(cells[f"{arm}@3e-5"][seed].end for arm in "CSU") / 3 - row.end
        for seed, row in cells["B@3e-5"].items()
    ]
    told = "is {:.2f} above uncorrected runs ({:.2f} to {:.2f}, p {:.2g})"
    assert told.format(*numbers(gained), judge.randomised(gained)) in page
    ends = [end(cells[f"S@{name}"]) for name in OF.panels["lm_rate"].variants]
    assert "score centering ends at {}, {} and {}.".format(*ends) in page
    chosen = dict.fromkeys("UCS", 0)
    slow, tests = "A@1.5e-5", table.verdicts(OF, "lm_rate_all", cells)
    told = (
        "the exact sampler ends at {}, and minus uncorrected it is {:.2f} ({:.2f} to {:.2f}, p {:.2g} after"
    )
    assert f"{told.format(end(cells[slow]), *tests[slow].gain, tests[slow].p)} Holm)" in page
    for seed in cells["B@3e-5"]:
        totals = {c: sum(row.end for s, row in cells[c].items() if s != seed) for c in cells if c[0] in "CSU"}
        chosen[max(totals, key=totals.get).removesuffix("@3e-5")] += 1
    assert chosen == {"U": 5, "C": 2, "S": 1}
    assert "with `importance_sampling` on five seeds, `token_tis` on two and score centering on one" in page


def test_the_pages_compare_the_corrections_on_the_seeds_of_all(page, lag, cap):
    seeds = set.intersection(*({*lag[arm]} for arm in "ABCSU"))
    ends = [f"{sum(lag[arm][seed].end for seed in seeds) / len(seeds):.2f}" for arm in "CUSBA"]
    told = "`token_tis` ends at {}, `importance_sampling` at {} and score centering at {}; uncorrected"
    assert f"On the {len(seeds)} seeds that ran all of them, {told.format(*ends)}" in page
    assert f"uncorrected runs end at {ends[3]}, and the exact sampler at {ends[4]}." in page
    readme = " ".join((settings.ROOT / "README.md").read_text().split())
    again = table.by_arm(OF, "lm_lag_again", rows.read())
    assert "the largest panel, of 16 seeds, shows one of each." in readme
    assert "a repeat on 12 other seeds shows none of `token_tis`" in readme
    assert len(again["C"]) == 12 and table.verdicts(OF, "lm_lag_again", again)["C"].p > 0.05
    first = table.verdicts(OF, "lm_lag", table.by_arm(OF, "lm_lag", rows.read()))
    assert "The first panel, which counted failed seeds, shows no gain" in readme
    assert all(verdict.p is None or verdict.p > 0.05 for verdict in first.values())
    tests = table.verdicts(OF, "lm_cap", cap)
    assert len(cap["B"]) == 16 and all(tests[arm].p < 0.05 and tests[arm].gain[1] > 0 for arm in "CUS")


def test_the_page_says_how_many_seeds_would_show_a_gain(page):
    def spread(condition, arm):
        lines = pooled.lines_of(OF, condition, rows.read())
        gained = pair(arm, "B", lines)
        mean = sum(gained) / len(gained)
        return math.sqrt(sum((gain - mean) ** 2 for gain in gained) / (len(gained) - 1))

    dose, int4, at_four = spread("lag8", "S"), spread("int4_trained", "C"), spread("lag", "C")
    ends = pair("C", "B", pooled.lines_of(OF, "lag", rows.read()))
    mean = sum(ends) / len(ends)
    readme = " ".join((settings.ROOT / "README.md").read_text().split())
    told = (
        f"ended {-min(ends):.2f} lower to {max(ends):.2f} higher than without, so its mean gain of {mean:.2f}"
    )
    assert f"{told} takes about {round((2.8 * at_four / mean) ** 2)} seeds to show." in readme
    assert f"would take about {round((2.8 * dose / 0.1) ** 2)} seeds of score centering" in page
    assert f"about {10 * round((2.8 * int4 / 0.04) ** 2 / 10)} seeds to show" in page
    assert f"a gain of {2.8 * dose / math.sqrt(8):.2f} or more there" in page
    assert f"a gain of `token_tis` of {2.8 * int4 / math.sqrt(8):.1f} or more" in page


def test_the_page_says_what_a_missing_cap_does(page, lag, cap):
    found, tests, gained = planned("lm_cap"), table.verdicts(OF, "lm_cap", cap), pair("U", "B", cap)
    told = "{:+.2f} ({:.2f} to {:.2f}, p {:.2g}, planned in `lm_cap`)".format(*found.difference, found.p)
    pooled_told, p = said("S", "U", lag)
    assert found.seeds == 16 and f"`importance_sampling` is {told}" in page
    mean, low, high = found.difference
    assert f"which does not, is {mean:.2f} ({low:.2f} to {high:.2f}, planned p {found.p:.2g})." in page
    assert f"pooled over 24 seeds it is {pooled_told}, {p}" in page
    assert not found.equal and f"and {tests['S'].p:.1g} in `lm_cap`" in page
    told = f"In `lm_cap` it ends {'{:.2f} ({:.2f} to {:.2f})'.format(*numbers(gained))}"
    assert told in page and f"above it on {sum(gain > 0 for gain in gained)} of 16 seeds" in page
    rate = table.by_arm(OF, "lm_rate", rows.read())
    uncapped = [cap["U"], *(of_cell for cell, of_cell in rate.items() if cell.startswith("U"))]
    logged = [x for of_arm in uncapped for line in of_arm.values() for x in line.rollouts]
    largest = max(x["ratio_max"] for x in logged if "ratio_max" in x)
    assert f"its largest ratio in any run was {largest:.0f}" in page
    gain = said("U", "B", lag)[0]
    assert f"gains {gain[1:5]}** {gain[6:]}, {len(lag['U'])} seeds, pooled)" in page


def test_the_page_says_what_token_tis_does(page, lag, cap):
    gain = said("C", "B", lag)[0]
    assert f"gains about {gain[1:5]}** {gain[6:]}, 36 seeds" in page
    alone, tests = pair("C", "B", cap), table.verdicts(OF, "lm_cap", cap)
    p = f"p {tests['C'].p:.1g} after Holm"
    told = f"(`lm_cap`): {'{:+.2f} ({:.2f} to {:.2f}'.format(*numbers(alone))}, {p}), above"
    assert told in page and f"on {sum(gain > 0 for gain in alone)} seeds. The first 20" in page
    first = [gain for seed, gain in judge.gaps(lag["C"], lag["B"]).items() if seed not in cap["C"]]
    mean, low, high = numbers(first)
    assert len(first) == 20 and f"did not ({mean:+.2f}, {low:.2f} to {high:.2f})" in page
    told, p = said("U", "C", lag)
    assert f"minus `token_tis` is {told}, {p} on the {len(pair('U', 'C', lag))} seeds of both" in page


def test_the_page_says_what_centering_does(page, lag, cap):
    alone, tests = pair("X", "B", cap), table.verdicts(OF, "lm_cap", cap)
    told = "without weights gains {:.2f}** ({:.2f} to {:.2f}, ".format(*numbers(alone))
    assert f"{told}p {tests['X'].p:.1g} after Holm), on {sum(gain > 0 for gain in alone)} of 16 seeds" in page
    told = "{:.2f} below `importance_sampling` ({:.2f} to {:.2f}, ".format(*numbers(pair("U", "X", cap)))
    assert told + said("U", "X", cap)[1] in page
    mean, low, high = numbers(pair("A", "S", lag))
    told = f"ends {mean:.2f} below the exact sampler** ({low:.2f} to {high:.2f}, "
    assert told + said("A", "S", lag)[1][:-1] in page and f"pooled, {len(pair('A', 'S', lag))} seeds)" in page
    gain = said("S", "C", lag)[0]
    assert f"{gain[1:5]} above `token_tis` ({gain[7:]}, pooled" in page


def test_the_page_says_what_int4_costs_each_arm(page):
    found, both = planned("lm_int4_both"), table.by_arm(OF, "lm_int4_both", rows.read())
    told = "it is {:.2f} more than without ({:.2f} to {:.2f}, p {:.2g}, planned in `lm_int4_both`)"
    assert told.format(*found.difference, found.p) in page
    cost = {arm: {s: row.scored("trained less served") for s, row in of.items()} for arm, of in both.items()}
    at_end = abs(round(sum(cost["B"].values()) / 8, 2))
    assert f"At the end it is {at_end:.2f} in uncorrected runs (0.48 with both weights)" in page
    arms = {"S": "score centering", "U": "`importance_sampling`", "X": "centering without weights"}
    for arm, what in arms.items():
        gaps = [gap - cost["B"][seed] for seed, gap in cost[arm].items()]
        mean, low, high = numbers(gaps)
        told = f"({low:.2f} to {high:.2f}, p {judge.randomised(gaps):.2g})"
        assert f"{mean:.2f} more with {what} {told}" in page
    gaps = [gap - cost["B"][seed] for seed, gap in cost["C"].items()]
    ps = [judge.randomised(gaps[:i] + gaps[i + 1 :]) for i in range(8)]
    assert sum(p > 0.05 for p in ps) == 5 and "without one of five of the eight seeds it is 0.06" in page


def test_the_page_says_what_corrections_gain_under_int4(page):
    first, served, trained = (
        pooled.lines_of(OF, name, rows.read()) for name in ("int4", "int4_served", "int4_trained")
    )
    assert f"`token_tis` minus uncorrected is {said('C', 'B', trained)[0]}), score centering " in page
    assert f"score centering {said('S', 'B', trained)[0]}), centering" in page
    assert f"centering without weights {said('X', 'B', trained)[0]}), and `imp" in page
    assert f"and `importance_sampling` {said('U', 'B', trained)[0]})." in page
    assert f"centering without weights is {said('X', 'B', served)[0]}), score centering" in page
    assert f"score centering {said('S', 'B', served)[0]}), `importance_sampling` " in page
    assert f"`importance_sampling` {said('U', 'B', served)[0]}), and" in page
    assert f"`token_tis` is {said('C', 'B', served)[0]})." in page
    means = [
        (one + other) / 2 for one, other in zip(pair("C", "B", first), pair("C", "B", served), strict=True)
    ]
    told = "{:.2f} ({:.2f} to {:.2f}, ".format(*numbers(means))
    assert f"Over both panels it is {told}p {judge.randomised(means):.2g}, each seed's mean)" in page
    loss = [f"{-round(x, 2):.2f}" for x in numbers(means)]
    readme = " ".join((settings.ROOT / "README.md").read_text().split())
    assert f"`token_tis` ended {loss[0]} lower ({loss[2]} to {loss[1]}, 8 seeds in two panels)" in readme
    for condition in ("int4_served", "int4_trained"):
        (of,) = (c for c in pooled.evidence(OF, rows.read())["conditions"] if c["name"] == condition)
        assert not any(r["p"] < OF.judged.significance for r in of["remedies"])  # no gain or loss is shown


@pytest.mark.parametrize(("panel", "arm"), [("lm_dose", "C"), ("lm_dose_center", "S")])
def test_the_page_says_how_the_gain_depends_on_k3(page, panel, arm):
    lines = table.by_arm(OF, panel, rows.read())
    found, tests = judge.sloped(lines, arm, "B", OF.judged), table.verdicts(OF, panel, lines)
    told = "{:+.3f} for each factor of e in k3 ({:.3f} to {:.3f}, p {:.2g}, planned)"
    told = told.format(*found.slope, found.p)
    assert told in page
    for lag, where in ((1, "without a lag"), (2, "at a lag of 2"), (8, "at a lag of 8")):
        mean, low, high = numbers(pair(f"{arm}@lag{lag}", f"B@lag{lag}", lines))
        assert f"{mean:+.2f} {where} ({low:.2f} to {high:.2f}, p {tests[f'{arm}@lag{lag}'].p:.2g})" in page
        if lag > 1:
            cost, low, high = numbers(pair("B@lag1", f"B@lag{lag}", lines))
            assert f"{cost:.2f} {where} ({low:.2f} to {high:.2f})" in page


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_the_page_says_what_token_tis_gains_under_a_format_of_8_bits(page, name):
    served, trained = (pooled.lines_of(OF, f"{name}_{whose}", rows.read()) for whose in ("served", "trained"))
    test = planned(f"lm_dose_{name}")
    told = f"{said('C', 'B', trained)[0]}, p {test.p:.2g}, planned in `lm_dose_{name}`)"
    assert f"`token_tis` minus uncorrected is {told}" in page
    assert (
        not test.equal and f"Scored with {name.upper()}, it is {', '.join(said('C', 'B', served))}." in page
    )
    costs = [", ".join(said("A", "B", lines)) for lines in (served, trained)]
    assert f"without rounding minus uncorrected is {costs[0]} and {costs[1]}." in page


def test_the_page_says_which_weights_score_higher_under_fp8(page):
    served, trained = (pooled.lines_of(OF, name, rows.read()) for name in ("fp8_served", "fp8_trained"))
    gaps = {arm: list(judge.gaps(served[arm], trained[arm]).values()) for arm in "BC"}
    mean, low, high = numbers(gaps["B"])
    told = f"{mean:.2f} ({low:.2f} to {high:.2f}, p {judge.randomised(gaps['B']):.2g}) in the mean"
    assert all(gap > 0 for gap in gaps["B"]) and f"on each of the eight seeds and by {told}" in page
    less = [one - other for one, other in zip(gaps["B"], gaps["C"], strict=True)]
    mean, low, high = numbers(less)
    assert f"{mean:.2f} smaller ({low:.2f} to {high:.2f}, p {judge.randomised(less):.2g})" in page

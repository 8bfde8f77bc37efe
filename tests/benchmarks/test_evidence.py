"""Which runs there are, how they are judged, and what is made of their lines."""

from __future__ import annotations

import itertools
import random
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from benchmarks.evidence import chain, judge, picture, reward, rows, runs, settings, table
from benchmarks.evidence.rows import Row
from slime_ext.errors import ConfigError
from slime_ext.launcher.arguments import parse_args
from slime_ext.launcher.task.prompts import read_prompts

OF = settings.read()
PANELS = list(OF.panels)


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


def test_every_run_is_one_that_the_launcher_takes(tmp_path):
    for panel in PANELS:
        for arm in OF.panels[panel].arms:
            flags = settings.located(OF.flags(panel, arm, 3, "cispo"))
            if OF.panels[panel].chain:
                flags |= chain.write(OF.panels[panel].chain, tmp_path)
            (tmp_path / "flags.yaml").write_text(yaml.safe_dump(flags))
            args = parse_args(["--config", str(tmp_path / "flags.yaml")])
            assert (args.seed, args.rollout_seed) == (3, 3)


def test_arms_differ_from_the_uncorrected_one_in_what_they_say():
    b = OF.flags("lag", "B", 1)
    lag = OF.panels["lag"].mismatch["update_weights_interval"]
    assert b["update_weights_interval"] == lag > 1 and "use_tis" not in b
    different = {arm: OF.flags("lag", arm, 1, "cispo" if arm == "G" else None) for arm in OF.arms}
    tis = {"use_tis": True, "custom_tis_function_path": "slime_ext.tis."}
    assert {k: v for k, v in b.items() if k not in different["A"]} == {"update_weights_interval": lag}
    assert different["F"] == b | {"lr": b["lr"] / 4}
    for arm, name in {
        "C": "token_tis",
        "D": "decoupled_geo_rs_token_tis",
        "E": "icepop",
        "G": "cispo",
    }.items():
        assert different[arm] == b | tis | {"custom_tis_function_path": f"slime_ext.tis.{name}"}
    assert OF.flags("lag", "G", 1, "metrics_only") == b


def test_nothing_runs_twice_and_seeds_are_kept_together():
    done = [row("B", 1), row("A", 1), row("B", 2)]
    left = list(runs.missing(OF, "lag", ["B", "A"], [1, 2, 3], done))
    assert left == [("A", 2), ("B", 3), ("A", 3)]
    assert rows.read() == rows.read() and not [k for k, n in _counts(rows.read()).items() if n > 1]


def _counts(lines):
    keys = [line.key for line in lines]
    return {key: keys.count(key) for key in keys}


def test_test_seeds_wait_for_frozen_settings_and_these_stay():
    thawed = OF.model_copy(update={"panels": {"lag": OF.panels["lag"].model_copy(update={"frozen": None})}})
    with pytest.raises(ConfigError, match="frozen: expected a date before test seeds run, got none"):
        runs.refuse_thawed(thawed, "lag", [1], [])
    runs.refuse_thawed(thawed, "lag", [101], [])
    date = yaml.safe_load("2026-01-01")
    frozen = OF.model_copy(update={"panels": {"lag": OF.panels["lag"].model_copy(update={"frozen": date})}})
    runs.refuse_thawed(frozen, "lag", [1], [row("B", 1)])
    with pytest.raises(ConfigError, match="expected the settings 000000000000 of B seed 1's line"):
        runs.refuse_thawed(frozen, "lag", [1], [row("B", 1, settings="000000000000")])


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


def test_holm_multiplies_by_the_comparisons_that_are_left():
    assert judge.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_holm_keeps_the_order_and_never_lowers_a_p():
    draw = random.Random(1)
    for n in range(1, 8):
        ps = [draw.random() ** 3 for _ in range(n)]
        found = judge.holm(ps)
        assert all(p <= q <= 1 for p, q in zip(ps, found, strict=True))
        assert min(found) == pytest.approx(min(1, n * min(ps)))
        ranked = [q for _, q in sorted(zip(ps, found, strict=True))]
        assert ranked == sorted(ranked)


def test_the_interval_of_the_mean_has_its_place_and_width():
    draw = random.Random(2)
    values = [draw.gauss(0.5, 0.1) for _ in range(400)]
    mean, low, high = judge.bootstrap(values, 2000)
    assert mean == pytest.approx(sum(values) / 400)
    # 1.96 x 0.1 / sqrt(400) = 0.0098 on each side; a fifth of it for the draw of values and resamples
    assert mean - low == pytest.approx(0.0098, rel=0.2) and high - mean == pytest.approx(0.0098, rel=0.2)


def test_the_tables_hold_every_seed_and_replace_the_former_ones(tmp_path):
    lines = [*cell("A", [0.9] * 8), *cell("B", [0.1] * 8), *cell("C", [0.88] * 8), row("G", 2, 0.5)]
    lines.append(row("C", 101, 0.123))  # a pilot
    document, readme = tmp_path / "evidence.md", tmp_path / "README.md"
    for file in (document, readme):
        file.write_text(f"before\n{table.BEGIN}former{table.END}\nafter\n")
    table.write(OF, lines, document, readme)
    for said in (readme.read_text(), document.read_text()):
        assert said.startswith("before\n") and said.endswith("\nafter\n") and "former" not in said
    cells = [
        f"{name} of 8 failed{p}, end {end}"
        for name, p, end in ((0, " (p 0.00047)", "0.90"), (8, "", "0.10"), (0, " (p 0.00047)", "0.88"))
    ]
    assert f"| {' | '.join(cells)} | 1 of 1 failed (p 1), end 0.50 |" in readme.read_text()
    assert "| B mismatch, uncorrected | 8 | 8 | 8 | 0 | 0.100 [0.100, 0.100] | -0.800" in said
    assert (
        "| C token_tis | 8 | 0 | 0 | 8 | 0.880 [0.880, 0.880] | -0.020 [-0.020, -0.020] | 0.000466 |" in said
    )
    assert "| G |  | 0.500 |" in said and "| 2 | token_is | 0.100 | 0.500 | A 0.900 |" in said
    assert "0.123" not in said


def test_the_committed_tables_are_those_of_the_committed_lines(tmp_path):
    copies = [tmp_path / path.name for path in (table.DOCUMENT, table.README)]
    for copy, path in zip(copies, (table.DOCUMENT, table.README), strict=True):
        copy.write_text(path.read_text())
    table.write(OF, rows.read(), *copies)
    assert [copy.read_text() for copy in copies] == [
        path.read_text() for path in (table.DOCUMENT, table.README)
    ]


def test_the_picture_has_a_line_for_each_seed_and_one_for_the_mean():
    lines = [*cell("A", [0.9, 0.8]), *cell("B", [0.1, 0.2, 0.3])]
    figure = picture.draw(OF, {"lag": table.by_arm(OF, "lag", lines)})
    drawn = [ax for ax in figure.axes if ax.get_visible()]
    assert [len(ax.lines) for ax in drawn] == [3, 4]
    assert list(drawn[1].lines[-1].get_ydata()) == pytest.approx([0.0, 0.1, 0.2])


def test_a_chains_answer_is_its_running_sums_and_the_files_are_the_same_each_time(tmp_path):
    assert chain.answer("bbdh") == "bcfe"  # 1, 1+1, 2+3, 5+7 modulo 8
    flags = chain.write(60, tmp_path)
    first = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert chain.write(60, tmp_path) == flags
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == first
    prompts = read_prompts(flags["prompt_data"], "input", "label")
    assert len(prompts) == 2048 and {len(p.label) for p in prompts} == {60}
    assert all(p.label == chain.answer(p.text[:-1]) and p.metadata["rm_type"] == "exact" for p in prompts)


def test_a_start_is_made_once_and_named_in_the_flags(tmp_path, monkeypatch):
    asked = []

    def trained(module, *words):
        asked.append(module)
        Path(words[words.index("--out") + 1]).mkdir()
        return Namespace(returncode=0)

    monkeypatch.setattr(runs, "_command", trained)
    panel = OF.panels["quantised"]
    found = [runs._start(panel, {"lr": 1.0}, tmp_path / "start-1") for _ in range(2)]
    assert found[0] == found[1] and asked == ["benchmarks.evidence.warm"]
    assert found[0]["hf_checkpoint"] == str(tmp_path / "start-1/model")
    assert runs._start(OF.panels["lag"], {}, tmp_path / "start-2") == {}


def test_the_reward_counts_tokens_not_characters():
    """a = 4, b = 5, the end = 2; <reserved0> = 12 is one token of eleven characters."""
    args, tokens = Namespace(hf_checkpoint=str(settings.ROOT / "configs/tiny/model")), [7, 7, 3]
    for answer, share, exact in [
        ([4, 5, 4, 5, 2], 1.0, 1.0),
        ([4, 5, 4, 5, 4], 4 / 5, 0.0),  # no end
        ([12, 5, 4, 5, 2], 4 / 5, 0.0),
        ([4, 5, 2], 2 / 5, 0.0),
        ([4, 5, 4, 5, 4, 2], 4 / 6, 0.0),
        ([12], 0.0, 0.0),
    ]:
        sample = Namespace(tokens=tokens + answer, response_length=len(answer), label="abab", metadata={})
        assert reward.tokens_in_place(args, sample) == pytest.approx(share)
        sample.metadata = {"rm_type": "exact"}
        assert reward.tokens_in_place(args, sample) == exact


def test_settings_looked_at_are_a_row_each_with_an_end_a_seed():
    line = {"chain": False, "length": 4, "lag": 8, "rounding": None, "lr": 1e-3, "cut": 1.0, "decay": True}
    line |= {"warm": 0.0, "entropy": 0.06, "rollouts": 64, "curve": [[0, 0.0]], "preset": "none"}
    lines = [line | {"seed": 2, "end": 0.5}, line | {"seed": 1, "end": 0.25}]
    lines += [line | {"seed": 1, "end": 0.75, "preset": "topr"}, line | {"seed": 1, "end": 1.0, "lag": 1}]
    rows = table.scouted(lines).splitlines()[2:]
    assert rows == [
        "| copy 4 | random | lag 8 | 0.001 linear | 0.06 | 64 | 0.25 0.50 |  |  |  | `topr` 0.75 |",
        "| copy 4 | random | none | 0.001 linear | 0.06 | 64 | 1.00 |  |  |  |  |",
    ]

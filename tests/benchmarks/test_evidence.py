"""Judges, tables and the picture of the recorded runs, against plain loops over the recorded lines."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random

import pytest
import yaml
from matplotlib.image import imread

from benchmarks.evidence import judge, pages, picture, pooled, rows, settings, table
from benchmarks.evidence.rows import Row

OF = settings.read()
pytestmark = pytest.mark.xdist_group("evidence")  # one worker draws the bootstraps, which judge keeps


@functools.cache
def measured():
    """What ran under each condition, of the committed lines."""
    return pooled.conditions(OF, rows.read())


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


def test_committed_lines_are_of_the_settings_that_are_there():
    for line in rows.read():
        assert line.settings == OF.digest(line.panel, line.arm), line.key


def test_a_run_is_recorded_once():
    keys = [line.key for line in rows.read()]
    assert len(keys) == len({*keys}) > 600


def test_a_run_with_the_settings_of_another_has_its_line():
    b = row("B", 1, panel="lm_lag", recommended="token_tis")
    c, a = (row(arm, 1, panel="lm_lag") for arm in "CA")
    cells = table.by_arm(OF, "lm_lag", [b, c, a])
    assert cells["G"] == cells["C"] == {1: c} and "D" not in cells
    said = list(table._shared("lm_lag", cells))
    assert said == ["The same runs, so no further evidence: G is C (seeds 1)."]
    assert list(table.own(cells)) == ["A", "B", "C"]
    unsure = row("B", 1, panel="lm_lag", recommended="metrics_only")
    assert table.by_arm(OF, "lm_lag", [unsure, c])["G"] == {1: unsure}
    followed = row("G", 1, panel="lm_lag")
    assert table.by_arm(OF, "lm_lag", [b, c, followed])["G"] == {1: followed}
    assert table.line_of(OF, "lm_lag", "B", 1, [followed]) is None
    rounded = OF.panels["lm_lag"].model_copy(update={"mismatch": {"rounding": "int8"}})
    two = OF.model_copy(update={"panels": OF.panels | {"rounded": rounded}})
    assert table.line_of(two, "rounded", "A", 1, [a]) == a
    assert table.line_of(two, "rounded", "B", 1, [b]) is None
    assert table.line_of(OF, "lag_again", "A", 9, [row("A", 9)]) is None  # without a host nothing is shared


def test_a_run_that_is_scored_twice_has_both_ends():
    both = row("B", 1, 0.5, panel="lm_int4_both", heldout_trained=[(0, 0.06), (2, 0.75)])
    whose = "served", "trained", "trained less served"
    assert [both.scored(one) for one in whose] == [0.5, 0.75, 0.25]
    assert row("B", 1, 0.5).scored("trained") is None and both.as_scored("trained").end == 0.75


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


def test_conditions_pool_panels_that_differ_in_arms_and_seeds_alone():
    found = yaml.safe_load(settings.FILE.read_text())
    found["conditions"]["lag"]["panels"].append("lm_int4")
    with pytest.raises(ValueError, match="lag: expected panels that differ in arms and seeds alone"):
        settings.Settings.model_validate(found)


PAGES = (pages.EVIDENCE, pages.RESULTS)


def test_the_committed_tables_are_those_of_the_committed_lines(tmp_path):
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        text = (settings.ROOT / name).read_text()
        former = text[text.index(pages.BEGIN) :].partition(pages.END)[0]
        (tmp_path / name).write_text(text.replace(former, f"{pages.BEGIN}former"))
    pages.write(OF, rows.read(), tmp_path)
    for name in PAGES:
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


def test_the_results_are_what_plain_arithmetic_makes_of_the_lines():
    assert {*measured()} == {*OF.conditions}
    for name, condition in measured().items():

        def ends(arm, name=name):
            if (name, arm) in SHARED:
                return ends_of(*SHARED[name, arm])
            panels = OF.conditions[name].panels
            if name.endswith("_trained"):
                lines = [line for line in committed() if [line["panel"]] == [*panels] and line["arm"] == arm]
                return {line["seed"]: line["heldout_trained"][-1][1] for line in lines}
            return ends_of(panels, arm)

        uncorrected = ends("B")
        assert condition.seeds == len(uncorrected)
        assert condition.end == pytest.approx(sum(uncorrected.values()) / len(uncorrected))
        assert {one.arm for one in condition.remedies} == {arm for arm in OF.arms if ends(arm)} - {"B", "G"}
        for remedy in condition.remedies:
            of_arm = ends(remedy.arm)
            gained = [of_arm[seed] - uncorrected[seed] for seed in of_arm if seed in uncorrected]
            assert remedy.seeds == len(gained) == len(of_arm)
            assert remedy.effect == pytest.approx(sum(gained) / len(gained))
            assert remedy.low <= remedy.effect <= remedy.high
        panels = [panel for panel in OF.conditions[name].panels if "@" not in panel]
        lines = [line for line in committed() if line["panel"] in panels and line["arm"] == "B"]
        if lines and lines[0].get("k3") is not None:
            assert (min(condition.k3), max(condition.k3)) == (
                min(line["k3"] for line in lines),
                max(line["k3"] for line in lines),
            )


def test_the_picture_has_the_numbers_of_its_lines(tmp_path):
    (ax,) = picture.gains(OF, measured(), rows.read()).axes
    drawn = [remedy for _, _, remedy in picture.lines(measured()) if remedy]
    of_lag = len(measured()["lag"].remedies)
    assert len(drawn) == of_lag + len(pooled.SHOWN) - 1
    assert {remedy.arm for remedy in drawn[of_lag:]} == {"C"}
    *intervals, (left, right) = ([*line.get_xdata()] for line in ax.lines if line.get_marker() == "None")
    assert intervals == [[remedy.low, remedy.high] for remedy in drawn] and left == right == 0
    assert [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D"] == [
        remedy.effect for remedy in drawn
    ]
    seeds = [[*line.get_xdata()] for line in ax.lines if line.get_marker() == "o"]
    assert list(map(len, seeds)) == [remedy.seeds for remedy in drawn]
    assert [sum(gained) / len(gained) for gained in seeds] == pytest.approx([r.effect for r in drawn])
    assert all(-picture.WIDEST < gain < picture.WIDEST for gained in seeds for gain in gained)
    texts = [text.get_text() for text in ax.texts]
    assert all(texts.count(remedy.gain) >= 1 for remedy in drawn)
    picture.write(OF, rows.read(), tmp_path)
    assert imread(tmp_path / "gains.png").shape[1] > 900


def pairs(condition, one, other):
    lines = pooled.lines_of(OF, condition, rows.read())
    return list(judge.gaps(lines[one], lines[other]).values())


def text_of(gained):
    return "{:.2f} ({:.2f} to {:.2f})".format(*judge.bootstrap(gained, OF.judged.resamples))


def spread(gained):
    mean = sum(gained) / len(gained)
    return math.sqrt(sum((gain - mean) ** 2 for gain in gained) / (len(gained) - 1))


def primary(panel):
    return judge.compare(table.by_arm(OF, panel, rows.read()), OF.panels[panel].primary, OF.judged)


def test_the_answers_of_the_page_are_those_of_the_runs():
    page = words_of(pages.EVIDENCE)
    conditions = measured()
    lag, half = conditions["lag"], conditions["half_rate"]
    assert f"Yes, {lag.of('A').gain.lstrip('+')} at the full" in page
    assert f"but {half.of('A').effect:.2f} at half" in page
    gained = [f"{lag.of(arm).effect:.2f}" for arm in "CUS"]
    assert gained[1] == gained[2] and lag.of("C").p < 0.05 and lag.of("U").p < 0.05 and lag.of("S").p < 0.05
    assert f"`token_tis` gains {gained[0]}, `importance_sampling` and score centering {gained[1]}." in page
    assert f"Half of it gains {lag.of('H').gain.lstrip('+')}" in page
    assert all(primary(panel).p > 0.05 for panel in ("lm_rate", "lm_rate_tis", "lm_rate_all"))
    centered = primary("lm_cap")
    assert centered.p > 0.05
    assert "importance_sampling` is {:.2f} ({:.2f} to {:.2f}).".format(*centered.difference) in page
    elsewhere = [name for name in conditions if name not in ("lag", "half_rate", "letters")]
    corrections = [r for name in elsewhere for r in conditions[name].remedies if r.arm not in ("A", "F", "H")]
    assert not any(remedy.p < 0.05 and remedy.effect > 0 for remedy in corrections)
    twice = zip(pairs("int4", "C", "B"), pairs("int4_served", "C", "B"), strict=True)
    assert f"`token_tis` loses {text_of([-(one + other) / 2 for one, other in twice])}." in page
    for panel, seeds, shown in (("lm_lag_again", 12, False), ("lm_cap", 16, True)):
        lines = table.by_arm(OF, panel, rows.read())
        assert len(lines["C"]) == seeds and (table.verdicts(OF, panel, lines)["C"].p < 0.05) == shown
    first = table.verdicts(OF, "lm_lag", table.by_arm(OF, "lm_lag", rows.read()))
    assert all(verdict.p is None or verdict.p > 0.05 for verdict in first.values())


def test_the_pages_say_how_noisy_a_run_is():
    page, results = words_of(pages.EVIDENCE), words_of(pages.RESULTS)
    first = {(row.panel, row.arm, row.seed): row.end for row in rows.read()}
    repeats = [row for row in rows.read(rows.AGAIN) if row.panel.startswith("lm_")]
    apart = [row.end - first[row.panel, row.arm, row.seed] for row in repeats]
    told = (
        f"ended {rms(apart):.2f} higher or lower (root mean square), and at most {max(map(abs, apart)):.2f}"
    )
    assert len(apart) == 24 and told in page and told in results
    rounded, twice = (table.by_arm(OF, name, rows.read()) for name in ("lm_int4", "lm_int4_both"))
    of_int4 = [gap for arm in "BCS" for gap in judge.gaps(rounded[arm], twice[arm]).values()]
    told = f"ended {rms(of_int4):.2f} higher or lower, and at most {max(map(abs, of_int4)):.2f}."
    assert len(of_int4) == 24 and told in results
    gained = pairs("lag", "C", "B")
    seeds = round((2.8 * spread(gained) * len(gained) / sum(gained)) ** 2)
    assert f"ended {-min(gained):.2f} lower to {max(gained):.2f} higher than without" in page
    assert f"to show its mean gain takes about {seeds} seeds." in page
    assert f"about {round((2.8 * spread(pairs('lag8', 'S', 'B')) / 0.1) ** 2)} of score centering" in results
    tis = round((2.8 * spread(pairs("int4_trained", "C", "B")) / 0.04) ** 2, -1)
    assert f"about {tis:.0f} of `token_tis` for 0.04" in results


def test_the_page_is_short_and_names_no_panel():
    text = (settings.ROOT / pages.EVIDENCE).read_text()
    assert len(text.split()) <= 900
    assert not [panel for panel in OF.panels if "_" in panel and panel in text]


def rms(gaps):
    return math.sqrt(sum(gap**2 for gap in gaps) / len(gaps))


def words_of(name):
    return " ".join((settings.ROOT / name).read_text().split())

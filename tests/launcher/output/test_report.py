"""report.png: one row per quantity that was logged, every run in it, one line for a run without metrics."""

from __future__ import annotations

import pytest

from slime_ext.errors import DataError
from slime_ext.launcher.output import report
from slime_ext.launcher.output.metrics_log import MetricsLog

STEP = {
    "train/off_policy/k3_kl": 1e-3,
    "train/off_policy/ratio_p01": 0.5,
    "train/off_policy/ratio_p50": 1.0,
    "train/off_policy/ratio_p99": 2.0,
}


def a_run(path, steps=3, **more):
    log = MetricsLog(path)
    for i in range(steps):
        log.log("step", STEP | more, rollout_id=i, step=i + 1)
        log.log(
            "rollout", {"rollout/raw_reward": 0.1 * i, "rollout/staleness_mean": i}, rollout_id=i, step=i + 1
        )
    log.log("eval", {"eval/heldout": 0.5}, rollout_id=i, step=i + 1)
    log.close()
    return path


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the pictures that are written."""
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    yield figures
    monkeypatch.undo()
    pyplot.close("all")


def legend(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_a_run_gets_a_picture_in_its_directory(tmp_path):
    path = report.write_report(a_run(tmp_path))
    assert path == tmp_path / "report.png"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_row_per_quantity_that_was_logged(tmp_path, drawn):
    report.write_report(a_run(tmp_path / "a"))
    report.write_report(a_run(tmp_path / "b", **{"train/tis_clipfrac": 0.1}))
    assert [len(figure.axes) for figure in drawn] == [4, 5]


def test_training_and_held_out_reward_share_a_row(tmp_path, drawn):
    report.write_report(a_run(tmp_path, steps=40))
    axes = drawn[0].axes[0]
    assert legend(axes) == ["training, mean of 10", "heldout"]
    assert list(axes.get_lines()[-1].get_ydata()) == [0.5]


@pytest.mark.slow
def test_several_runs_are_named_and_coloured(tmp_path, drawn):
    paths = [a_run(tmp_path / "plain"), a_run(tmp_path / "fixed")]
    report.draw(paths, tmp_path / "both.png")
    assert legend(drawn[0].axes[1]) == ["plain, k3", "fixed, k3"]
    assert len({line.get_color() for line in drawn[0].axes[1].get_lines()}) == 2


def test_a_null_is_a_gap(tmp_path):
    log = MetricsLog(tmp_path)
    for step, value in enumerate([1.0, float("nan"), 3.0]):
        log.log("step", {"train/off_policy/k3_kl": value}, rollout_id=0, step=step)
    run = report.Run("a", report.read_metrics(tmp_path), "k")
    assert run.points("train/off_policy/k3_kl") == ([0, 2], [1.0, 3.0])


def test_a_run_with_nothing_to_draw_is_named(tmp_path):
    MetricsLog(tmp_path).log("step", {"other": 1.0}, rollout_id=0, step=0)
    with pytest.raises(DataError, match="expected at least one metric"):
        report.write_report(tmp_path)


def test_the_command_says_what_is_missing(tmp_path, capsys):
    assert report.main([str(tmp_path / "gone")]) == 2
    assert "expected a run's directory" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path, capsys):
    MetricsLog(tmp_path).log("step", {"train/off_policy/k3_kl": 1.0}, rollout_id=0, step=0)
    (tmp_path / "file").write_text("")
    assert report.main([str(tmp_path), "--out", str(tmp_path / "file" / "x.png")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_picture_of_a_kind_that_is_not_drawn_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        report.main([str(tmp_path), "--out", "picture.txt"])
    assert "--out: expected a name that ends in .png, .pdf, .svg, got picture.txt" in capsys.readouterr().err


@pytest.mark.parametrize("first", [0, 1])
def test_every_value_of_every_run_is_in_sight(tmp_path, drawn, first):
    """Whichever run comes first; one has rewards below 0, older samples and more clipped weights."""
    names = ("train/off_policy/clipped_fraction", "train/staleness")
    small = a_run(tmp_path / "small", **dict.fromkeys(names, 0.0))
    large = a_run(tmp_path / "large", steps=9, **dict.fromkeys(names, 0.9))
    log = MetricsLog(large)
    log.log("rollout", {"rollout/raw_reward": -4.0, "rollout/staleness_mean": 30}, rollout_id=9, step=10)
    log.log("rollout", {"rollout/raw_reward": 7.0, "rollout/staleness_mean": 0}, rollout_id=10, step=11)
    log.close()
    report.draw([small, large][:: 1 - 2 * first], tmp_path / "both.png")
    for ax in drawn[0].axes:
        low, high = ax.get_ylim()
        values = [value for line in ax.get_lines() for value in line.get_ydata()]
        assert low <= min(values) and max(values) <= high, ax.get_ylabel()
    assert drawn[0].axes[-1].get_ylim()[0] > -1

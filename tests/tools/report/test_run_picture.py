"""The picture of runs: what hosts leave is read, healthy ranges marked, no panel empty, seeds are a band."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest

from slime_ext.errors import DataError
from slime_ext.tools.report import run_picture
from slime_ext.tools.report.run_series import read_run, run_folders

STEPS_PER_ROLLOUT = 2
K3 = "off_policy/k3_kl"


def events(folder, series):
    """Written with the tensorboard library; series: name -> values from step 0."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    for name, values in series.items():
        for step, value in enumerate(values):
            writer.add_scalar(name, value, step)
    writer.close()


def slime_run(folder, rollouts=4, reward=0.1, **more):
    """What slime logs: rollouts counted under rollout/ and eval/, optimizer steps under train/."""
    steps = rollouts * STEPS_PER_ROLLOUT
    events(
        folder / "tb",
        {
            "rollout/raw_reward": [reward * i for i in range(rollouts)],
            "eval/aime": [0.5],
            "eval/aime-truncated_ratio": [0.25],
            "eval/aime/response_len/mean": [100.0],
            "train/off_policy/k3_kl": [1e-2] * steps,
            "train/off_policy/clipped_fraction": [math.nan, *[0.2] * (steps - 1)],
            **more,
        },
    )
    return folder


def off_policy_lines(folder, rollouts=4):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "rollout_id": r,
            "step_id": s,
            "off_policy/ess_weight": 0.9,
            "off_policy/k3_kl": None if r == 1 else 1e-4,
        }
        for r in range(rollouts)
        for s in range(STEPS_PER_ROLLOUT)
    ]
    lines = [json.dumps(row) for row in rows]
    (folder / "off_policy.jsonl").write_text("\n".join(lines) + '\n{"rollout_id": 9, "off_')


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be written."""
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    yield figures
    monkeypatch.undo()
    pyplot.close("all")


def titles(figure):
    return [ax.get_ylabel().replace("\n", " ") for ax in figure.axes]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_events_and_lines_of_a_slime_run_become_series_over_optimizer_steps(tmp_path):
    slime_run(tmp_path)
    off_policy_lines(tmp_path / "checkpoints")
    found = read_run(tmp_path)
    assert found["rollout/raw_reward"] == pytest.approx({0: 0.0, 2: 0.1, 4: 0.2, 6: 0.3})
    assert list(found["train/off_policy/k3_kl"]) == list(range(8))  # the log's, which is there
    assert found["train/off_policy/k3_kl"][0] == pytest.approx(1e-2)
    assert list(found["train/off_policy/clipped_fraction"]) == list(range(1, 8))  # NaN is a gap
    assert found["train/off_policy/ess_weight"] == dict.fromkeys(range(8), 0.9)  # the file's alone


def test_without_a_log_the_lines_are_read(tmp_path):
    off_policy_lines(tmp_path)
    assert list(read_run(tmp_path)["train/off_policy/k3_kl"]) == [0, 1, 4, 5, 6, 7]  # a null is a gap


def test_a_log_that_counts_optimizer_steps_everywhere_is_taken_as_it_is(tmp_path):
    """slime with --wandb-always-use-train-step."""
    from torch.utils.tensorboard import SummaryWriter

    for name, step in (("rollout/raw_reward", 4), ("train/loss", 1)):
        writer = SummaryWriter(str(tmp_path / "tb"))
        for i in range(0, 40, step):
            writer.add_scalar(name, 0.5, i)
        writer.close()
    assert list(read_run(tmp_path)["rollout/raw_reward"]) == list(range(0, 40, 4))
    off_policy_lines(tmp_path, rollouts=20)  # two steps per rollout
    found = read_run(tmp_path)
    assert list(found["rollout/raw_reward"]) == list(range(0, 40, 4))
    assert list(found["train/off_policy/ess_weight"]) == list(range(40))


def test_one_panel_per_quantity_that_was_logged(tmp_path, drawn):
    run_picture.draw([slime_run(tmp_path)], tmp_path / "report.png")
    figure = drawn[0]
    assert titles(figure) == ["reward", "mismatch KL (nats per token)", "weights clipped (fraction)"]
    assert legend(figure.axes[0]) == ["training", "aime"]  # neither lengths nor truncations of evaluations
    bands = [patch.get_y() + patch.get_height() for patch in figure.axes[2].patches]
    assert bands == pytest.approx([0.05])  # docs/metrics.md: clipped_fraction is healthy below 0.05
    assert figure.axes[2].get_ylim()[0] == 0  # a fraction has nothing below
    low, high = figure.axes[1].get_ylim()
    assert low < 5e-3 < 1e-2 < high  # the healthy range is in sight also where the run never was


def test_without_the_plugin_the_hosts_own_difference_is_drawn(tmp_path, drawn):
    events(tmp_path, {"rollout/raw_reward": [0.0, 0.1], "train/train_rollout_logprob_abs_diff": [0.01, 0.02]})
    run_picture.draw([tmp_path], tmp_path / "report.png")
    assert titles(drawn[0]) == ["reward", "log-prob difference (nats)"]


def test_a_quantity_that_is_always_0_has_no_panel(tmp_path, drawn):
    zero = {"train/off_policy/clipped_fraction": [0.0] * 8, "rollout/staleness_mean": [0.0] * 4}
    run_picture.draw([slime_run(tmp_path, reward=0.0, **zero)], tmp_path / "report.png")
    assert titles(drawn[0]) == ["reward", "mismatch KL (nats per token)"]


def test_held_out_scores_are_the_largest_and_the_training_reward_is_a_moving_mean(tmp_path, drawn):
    slime_run(tmp_path, rollouts=8, **{"eval/aime": [0.109, 0.594]})
    run_picture.draw([tmp_path], tmp_path / "report.png", title="a\nb: 11% -> 59%")
    figure, reward = drawn[0], drawn[0].axes[0]
    assert figure.get_suptitle() == "a\nb: 11% -> 59%"
    raw, mean, held_out = reward.get_lines()
    assert [*mean.get_ydata()] == pytest.approx([0.1 * (i + i + 1) / 2 for i in range(7)])
    assert raw.get_linewidth() < mean.get_linewidth() and legend(reward) == ["training, mean of 2", "aime"]
    assert held_out.get_marker() == "o" and held_out.get_markersize() > 3 * mean.get_linewidth()
    assert [text.get_text() for text in reward.texts] == ["11%", "59%"]
    heights = [ax.get_position().height for ax in figure.axes]
    assert heights[0] > 1.5 * max(heights[1:])


def test_seeds_of_a_setting_are_its_mean_and_a_band_from_the_lowest_to_the_highest(tmp_path, drawn):
    for seed, reward in ((1, 0.1), (2, 0.3)):
        slime_run(tmp_path / f"token_tis-seed{seed}", reward=reward)
    other = slime_run(tmp_path / "none", reward=0.0)
    seeds = [tmp_path / "token_tis-seed1", tmp_path / "token_tis-seed2"]
    run_picture.draw([*seeds, other], tmp_path / "a.png")
    run_picture.draw([tmp_path], tmp_path / "b.png", labels=["all"])
    reward = drawn[0].axes[0]
    first = next(line for line in reward.get_lines() if line.get_label() == "token_tis, training")
    assert list(first.get_ydata()) == pytest.approx([0.0, 0.2, 0.4, 0.6])
    (band,) = (c.get_paths()[0].vertices[:, 1] for c in reward.collections[:1])
    assert (band.min(), band.max()) == pytest.approx((0.0, 0.9))
    assert "lowest to highest" in drawn[0].get_suptitle()
    mean = next(line for line in drawn[1].axes[0].get_lines() if line.get_label() == "training")
    assert list(mean.get_ydata()) == pytest.approx([0.0, 0.4 / 3, 0.8 / 3, 1.2 / 3])


def test_every_value_of_every_run_is_in_sight(tmp_path, drawn):
    """Whichever run comes first; one has rewards below 0, older samples and more clipped weights."""
    stale = "rollout/staleness_mean"
    small = slime_run(tmp_path / "small", reward=0.0, **{stale: [0.0] * 4})
    large = slime_run(tmp_path / "large", reward=-4.0, **{stale: [30.0] * 4, "eval/aime": [7.0]})
    for order in ([small, large], [large, small]):
        run_picture.draw(order, tmp_path / "both.png")
        for ax in drawn[-1].axes:
            low, high = ax.get_ylim()
            values = [value for line in ax.get_lines() for value in line.get_ydata()]
            assert low <= min(values) and max(values) <= high, ax.get_ylabel()


def test_folders_that_hold_no_run_are_named(tmp_path):
    for folder, said in (
        (tmp_path / "gone", "expected the folder of a run"),
        (tmp_path, "expected TensorBoard"),
    ):
        with pytest.raises(DataError, match=said):
            run_picture.draw([folder], tmp_path / "report.png")
    (tmp_path / "rollout_data").mkdir()  # of which nothing was dumped
    events(tmp_path, {"other": [1.0]})
    with pytest.raises(DataError, match="expected at least one metric that the picture draws"):
        run_picture.draw([tmp_path], tmp_path / "report.png")


def test_a_folder_is_one_run_or_several_side_by_side(tmp_path):
    one, two = tmp_path / "runs/one", tmp_path / "runs/two"
    for place in (one, two):
        events(place / "log", {"train/loss": [1.0]})
        off_policy_lines(place / "checkpoints")
    assert run_folders(tmp_path) == [one, two]
    assert run_folders(one) == [one]


def test_a_link_to_a_run_beside_it_counts_once(tmp_path):
    for name in ("s1", "s2", "s3"):
        off_policy_lines(tmp_path / name)
    (tmp_path / "latest").symlink_to("s3")
    assert sorted(run.resolve().name for run in run_folders(tmp_path)) == ["s1", "s2", "s3"]


# What subfolders hold -> those that are runs of their own; "" is the folder itself.
SUBFOLDERS = {
    ("a log", "a lines", "b lines"): ["a", "b"],
    ("a lines", "b lines"): ["a", "b"],
    ("a log", "b log"): ["a", "b"],
    ("a log", "b lines"): [""],
    ("a/log log", "a/save lines", "b/save lines"): ["a", "b"],
    (" lines", "a log"): [""],
    (" log", "a lines"): [""],
}


@pytest.mark.parametrize("held", SUBFOLDERS)
def test_each_subfolder_with_a_log_or_lines_of_its_own_is_a_run(tmp_path, held):
    for folder, _, kind in (place.rpartition(" ") for place in held):
        if kind == "lines":
            off_policy_lines(tmp_path / folder)
        else:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "events.out.tfevents.1").write_bytes(b"")
    assert run_folders(tmp_path) == [tmp_path / folder for folder in SUBFOLDERS[held]]


def test_two_runs_in_one_another_are_no_curve(tmp_path):
    off_policy_lines(tmp_path)
    off_policy_lines(tmp_path / "exp2")
    with pytest.raises(DataError, match=r"expected one off_policy\.jsonl of a run, got 2: ") as error:
        run_picture.draw([tmp_path], tmp_path / "report.png")
    assert all(str(tmp_path / name) in str(error.value) for name in ("off_policy.jsonl", "exp2/off_policy"))


NAMES = (r"a$\frac{$b", "a$b$c", "_hidden"), (r"b\$c", "c$$", "d%e{")


@pytest.mark.parametrize("names", NAMES)
def test_a_name_of_a_folder_or_an_evaluation_is_no_formula(tmp_path, monkeypatch, names):
    """As matplotlib itself draws it: its SVG holds a name's letters where no formula is read."""
    from matplotlib import rcParams

    monkeypatch.setitem(rcParams, "svg.fonttype", "none")
    for name in names:
        slime_run(tmp_path / name, **{f"eval/{name}x": [0.5]})
    run_picture.draw([tmp_path / name for name in names], tmp_path / "a.svg")
    shown = ElementTree.parse(tmp_path / "a.svg").getroot().itertext()
    text = " ".join(" ".join(shown).split())
    assert " and ".join(names) in text
    for name in names:
        assert f"{name}, training" in text and f"{name}, {name}x" in text

"""The panels in configs/panels name metrics that exist, and TensorBoard takes their layout."""

from __future__ import annotations

from pathlib import Path

import yaml

from slime_ext import presets
from slime_ext.core.metrics import names

FOLDER = Path(__file__).parents[3] / "configs/panels"
LAYOUT = yaml.safe_load((FOLDER / "tensorboard.yaml").read_text())
TAGS = [tag for charts in LAYOUT.values() for _, tags in charts.values() for tag in tags]


def test_every_tag_is_a_metric_and_none_comes_twice():
    known = names.known_names(presets.get("metrics_only"))
    found = [tag.removeprefix("train/off_policy/").removesuffix("$") for tag in TAGS]
    assert set(found) <= set(known) and len(set(found)) == len(found)
    assert all(tag.startswith("train/off_policy/") and tag.endswith("$") for tag in TAGS)


def test_what_shows_a_fault_has_a_chart():
    assert {
        f"train/off_policy/{name}$" for name in ("k3_kl", "certified", "ess_weight", "kept_fraction")
    } <= set(TAGS)


def test_tensorboard_takes_the_layout(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        writer.add_custom_scalars(LAYOUT)
    events = EventAccumulator(str(tmp_path)).Reload()
    (tag,) = events.Tags()["tensors"]
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors(tag)[0].tensor_proto.string_val[0])
    charts = [chart for category in layout.category for chart in category.chart]
    assert [chart.title for chart in charts] == [title for charts in LAYOUT.values() for title in charts]
    margins = [series for chart in charts for series in chart.margin.series]
    assert [s.value for s in margins] == ["train/off_policy/ratio_p50$"]

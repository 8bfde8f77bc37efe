"""What a host logs is also written down; the host's own logging stays as it is."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from slime_ext.tools.without_cuda import tracking


def test_numbers_are_written_and_the_host_logs_all(tmp_path, monkeypatch):
    calls = []
    module = SimpleNamespace(log=lambda args, metrics, step_key: calls.append((metrics, step_key)))
    monkeypatch.setenv(tracking.FILE, str(tmp_path / "tracked.jsonl"))
    tracking._also_write(module)
    metrics = {"train/step": 3, "train/loss": torch.tensor(0.5), "train/picture": object()}
    module.log(None, metrics, "train/step")
    assert calls == [(metrics, "train/step")]
    written = json.loads((tmp_path / "tracked.jsonl").read_text())
    assert written == {"axis": "train/step", "metrics": {"train/step": 3.0, "train/loss": 0.5}}


def test_a_release_that_logs_elsewhere_is_left_alone():
    module = SimpleNamespace(other=1)
    tracking._also_write(module)
    assert vars(module) == {"other": 1}

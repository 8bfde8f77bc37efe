"""Weights on disk, and on their way into a server."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from slime_ext.errors import EngineError
from slime_ext.launcher.rollout.client import EngineClient
from slime_ext.launcher.rollout.weight_sync import push_weights, versions, write_weights


@pytest.fixture
def template(tmp_path):
    directory = tmp_path / "template"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (directory / name).write_text(name)
    return directory


def state(value=1.0):
    tied = torch.full((2, 3), value)
    return {"a": tied, "b": tied, "c": torch.arange(6.0).view(2, 3).T}


def test_a_version_is_a_whole_model_directory(template, tmp_path):
    path = write_weights(state(), template, tmp_path / "weights", 4)
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    written = load_file(path / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in state().items())


def test_a_failed_write_leaves_nothing(template, tmp_path):
    with pytest.raises(AttributeError):
        write_weights({"a": None}, template, tmp_path / "weights", 4)
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_version_is_written_over_by_a_continued_run(template, tmp_path):
    write_weights(state(1.0), template, tmp_path, 4)
    path = write_weights(state(2.0), template, tmp_path, 4)
    assert load_file(path / "model.safetensors")["a"].unique() == 2.0


def test_pushing_keeps_the_last_two_versions(stand_in, template, tmp_path):
    client = EngineClient(stand_in.url)
    for version in (2, 9, 10):
        push_weights(client, state(), template, tmp_path / "weights", version)
    assert [version for version, _ in versions(tmp_path / "weights")] == [9, 10]
    assert client.weight_version() == "10"


def test_refused_weights_are_an_error(stand_in, template, tmp_path, monkeypatch):
    monkeypatch.setattr(type(stand_in), "refuse_weights", True)
    with pytest.raises(EngineError, match=r"update_weights_from_disk.*status 400"):
        push_weights(EngineClient(stand_in.url), state(), template, tmp_path / "weights", 2)


def test_no_folder_holds_no_versions(tmp_path):
    assert versions(tmp_path / "absent") == []

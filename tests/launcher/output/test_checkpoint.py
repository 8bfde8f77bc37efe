"""Checkpoints: what was saved comes back, a kill leaves the one before, other layouts are refused."""

from __future__ import annotations

import threading
from argparse import Namespace

import pytest
import torch

from slime_ext.errors import ConfigError, DataError
from slime_ext.launcher.output import checkpoint

ONE = {"tensor": 1, "pipeline": 1, "context": 1, "data": 1}


def save(directory, iteration, payload=None, **settings):
    return checkpoint.save(directory, iteration, 0, payload or {"n": iteration}, layout=ONE, **settings)


def test_what_was_saved_comes_back(tmp_path):
    payload = {
        "model": {"w": torch.arange(3.0)},
        "rng": torch.get_rng_state(),
        "data": {"epoch": 2},
        "t": (1, None),
    }
    save(tmp_path, 7, payload)
    iteration, got = checkpoint.load(tmp_path, 0, layout=ONE)
    assert (iteration, got["data"], got["t"]) == (7, {"epoch": 2}, (1, None))
    assert torch.equal(got["model"]["w"], payload["model"]["w"])


def test_every_rank_gets_its_own_back(tmp_path):
    barrier = threading.Barrier(3)
    layout = ONE | {"data": 3}

    def rank(i):
        checkpoint.save(tmp_path, 4, i, {"rank": i}, layout=layout, barrier=barrier.wait)

    ranks = [threading.Thread(target=rank, args=(i,)) for i in range(3)]
    [t.start() for t in ranks]
    [t.join() for t in ranks]
    assert [checkpoint.load(tmp_path, i, layout=layout)[1]["rank"] for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("moment", ["_write_tensors", "_publish", "_write_text", "_sync_directory"])
def test_a_kill_leaves_the_checkpoint_before(tmp_path, monkeypatch, moment):
    def die(*_):
        raise KeyboardInterrupt

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, moment, die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert checkpoint.load(tmp_path, 0, layout=ONE) == (1, {"n": 1})
    save(tmp_path, 2)
    assert checkpoint.load(tmp_path, 0, layout=ONE) == (2, {"n": 2})
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [3, 5]), (0, [1, 3, 5])])
def test_the_newest_stay(tmp_path, keep, left):
    for iteration in (1, 3, 5):
        save(tmp_path, iteration, keep=keep)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == [f"iter_{i:07d}" for i in left]


def test_the_same_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 1, {"n": 1})
    save(tmp_path, 1, {"n": 2})
    assert checkpoint.load(tmp_path, 0, layout=ONE) == (1, {"n": 2})


def test_another_layout_is_refused_in_one_line(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(
        ConfigError, match=r"expected the sizes tensor 2 .* got a checkpoint of tensor 1"
    ) as error:
        checkpoint.load(tmp_path, 0, layout=ONE | {"tensor": 2})
    assert "\n" not in str(error.value)


def test_no_checkpoint_is_named(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(ConfigError, match="expected a directory with latest_checkpointed"):
        checkpoint.load(tmp_path, 0, layout=ONE)


def test_a_damaged_file_is_named(tmp_path):
    path = save(tmp_path, 1)
    (path / "rank_0.pt").write_bytes(b"half")
    with pytest.raises(DataError, match=r"rank_0\.pt: expected a checkpoint of this rank"):
        checkpoint.load(tmp_path, 0, layout=ONE)


def test_a_disk_that_refuses_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"--save .* expected to write iteration 1"):
        save(tmp_path / "file", 1)


def test_the_layout_is_read_from_the_arguments():
    args = Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=3,
        context_parallel_size=4,
        data_parallel_size=5,
    )
    assert checkpoint.layout_of(args) == {"tensor": 2, "pipeline": 3, "context": 4, "data": 5}

"""Checkpoints: what was saved comes back, a kill leaves the one before, other layouts are refused."""

from __future__ import annotations

import resource
import subprocess
import threading
from argparse import Namespace

import pytest
import torch

from slime_ext.errors import ConfigError, DataError
from slime_ext.launcher.output import checkpoint
from slime_ext.launcher.validation import model

ONE = {"tensor": 1, "norm_epsilon": 1e-6}


def load(directory, sizes=ONE):
    """The newest iteration that is sound, and what it holds."""
    iteration, _ = checkpoint.newest(directory, sizes, 1)
    return iteration, checkpoint.load(directory, iteration, 0)


def save(directory, iteration, payload=None, **settings):
    return checkpoint.save(directory, iteration, 0, payload or {"n": iteration}, sizes=ONE, **settings)


def test_what_was_saved_comes_back(tmp_path):
    payload = {
        "model": {"w": torch.arange(3.0)},
        "rng": torch.get_rng_state(),
        "data": {"epoch": 2},
        "t": (1, None),
    }
    save(tmp_path, 7, payload)
    iteration, got = load(tmp_path)
    assert (iteration, got["data"], got["t"]) == (7, {"epoch": 2}, (1, None))
    assert torch.equal(got["model"]["w"], payload["model"]["w"])


def test_every_rank_gets_its_own_back(tmp_path):
    barrier = threading.Barrier(3)

    def rank(i):
        checkpoint.save(tmp_path, 4, i, {"rank": i}, sizes=ONE, barrier=barrier.wait)

    ranks = [threading.Thread(target=rank, args=(i,)) for i in range(3)]
    [t.start() for t in ranks]
    [t.join() for t in ranks]
    assert checkpoint.newest(tmp_path, ONE, 3) == (4, [])
    assert [checkpoint.load(tmp_path, 4, i)["rank"] for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("moment", ["_write_tensors", "_synced", "_sum", "_sync_directory"])
def test_a_kill_leaves_the_checkpoint_before(tmp_path, monkeypatch, moment):
    def die(*_):
        raise KeyboardInterrupt

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, moment, die)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert load(tmp_path) == (1, {"n": 1})
    save(tmp_path, 2)
    assert load(tmp_path) == (2, {"n": 2})
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [3, 5]), (0, [1, 3, 5])])
def test_the_newest_stay(tmp_path, keep, left):
    for iteration in (1, 3, 5):
        save(tmp_path, iteration, keep=keep)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == [f"iter_{i:07d}" for i in left]


def test_the_same_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 1, {"n": 1})
    save(tmp_path, 1, {"n": 2})
    assert load(tmp_path) == (1, {"n": 2})


@pytest.mark.parametrize(("name", "value"), [("tensor", 2), ("norm_epsilon", 1e-5)])
def test_other_sizes_are_refused_in_one_line(tmp_path, name, value):
    save(tmp_path, 1)
    what = name.replace("_", " ")
    with pytest.raises(
        ConfigError, match=f"expected {what} .*, which it was saved with, got {value}"
    ) as error:
        load(tmp_path, ONE | {name: value})
    assert "\n" not in str(error.value)


def test_no_checkpoint_is_named(tmp_path):
    assert checkpoint.iterations(tmp_path) == []
    with pytest.raises(ConfigError, match="expected a directory with checkpoints"):
        load(tmp_path)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": lambda path: flip_a_bit(path / "rank_0.pt"),
    "cut": lambda path: (path / "rank_0.pt").write_bytes((path / "rank_0.pt").read_bytes()[:-9]),
    "gone": lambda path: (path / "rank_0.pt").unlink(),
    "no checksum": lambda path: (path / "rank_0.pt.sha256").unlink(),
    "no sizes": lambda path: (path / checkpoint.SIZES).write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_newest_sound_one_and_is_named(tmp_path, damage):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration, keep=0)
    for iteration in (2, 3):
        DAMAGES[damage](tmp_path / f"iter_000000{iteration}")
    found, lines = checkpoint.newest(tmp_path, ONE, 1)
    assert found == 1 and len(lines) == 2
    assert "iter_0000003 is damaged" in lines[0] and lines[0].endswith("going on from iter_0000001")
    DAMAGES[damage](tmp_path / "iter_0000001")
    with pytest.raises(ConfigError, match=r"iter_0000003 is damaged .* no other is sound"):
        load(tmp_path)


def test_a_run_that_went_on_from_before_a_damaged_checkpoint_removes_it_and_keeps_the_sound_one(tmp_path):
    for iteration in (1, 2):
        save(tmp_path, iteration)
    flip_a_bit(tmp_path / "iter_0000002/rank_0.pt")
    save(tmp_path, 1, {"n": "again"})
    assert checkpoint.iterations(tmp_path) == [1] and load(tmp_path) == (1, {"n": "again"})


def test_the_checksum_is_one_that_sha256sum_reads(tmp_path):
    path = save(tmp_path, 1)
    done = subprocess.run(["sha256sum", "-c", "rank_0.pt.sha256"], cwd=path, capture_output=True, text=True)
    assert done.stdout == "rank_0.pt: OK\n"


def test_a_disk_that_refuses_is_named_and_nothing_partial_stays(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"--save .* expected to write iteration 1"):
        save(tmp_path / "file", 1)
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(DataError, match="expected to write iteration 2, got File too large"):
            save(tmp_path, 2, {"w": torch.ones(9999)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "iter_0000001"] and load(tmp_path)[0] == 1


def test_sizes_are_read_from_the_arguments():
    names = [*model.LAYOUT.values(), *model.MODEL]
    sizes = model.sizes_of(Namespace(**{name: i for i, name in enumerate(names)}))
    assert list(sizes.values()) == list(range(len(names))) and sizes["context"] == 2

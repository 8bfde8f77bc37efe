"""Arrays and numbers of numpy in a dump are data; what else numpy can be made to unpickle is refused."""

from __future__ import annotations

import zipfile

import numpy
import pytest
import torch

from slime_ext.errors import DataError
from slime_ext.tools.analysis.readers.unpickle import _names, load_plain
from tests.tools.analysis import dumps
from tests.tools.analysis.test_hostile_dumps import rewrite
from tests.tools.analysis.test_readers import FIRST, Runs, only, same


def saved(path, content):
    torch.save(content, path)
    return path


def loaded(tmp_path, value):
    return load_plain(saved(tmp_path / "x.pt", {"samples": [value]}))["samples"][0]


def test_arrays_are_what_they_were(tmp_path):
    for dtype in ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]:
        for shape in [(), (0,), (5,), (4, 2, 3)]:
            folder = tmp_path / f"{dtype}-{shape}"
            folder.mkdir()
            value = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape).astype(dtype)
            found = loaded(folder, value)
            assert found.dtype == value.dtype and numpy.array_equal(found, value)
            assert numpy.array_equal(loaded(folder, value.copy(order="F")), value)


def test_numbers_are_what_they_were(tmp_path):
    for number, value in enumerate(
        [numpy.float64(0.5), numpy.float32(2), numpy.int32(-3), numpy.bool_(True)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert loaded(folder, value) == value


def test_names_of_numpy_1_are_the_same(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"samples": [numpy.arange(3), numpy.float32(2)]}, path)
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("x/data.pkl")
    rewrite(path, pickled.replace(b"numpy._core.", b"numpy.core."))
    found = load_plain(path)["samples"]
    assert found[0].tolist() == [0, 1, 2] and found[1] == 2


def test_tensors_are_what_they_were(tmp_path):
    whole = torch.arange(-6, 6).reshape(3, 4)
    names = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 bool float8_e4m3fn uint16"
    values = [whole.to(getattr(torch, name)) for name in names.split()]
    values += [whole.T, whole[1:, ::2], whole[0], torch.zeros(0), torch.nn.Parameter(torch.ones(2))]
    for value, found in zip(values, loaded(tmp_path, values), strict=True):
        assert torch.as_tensor(found).dtype == value.dtype and found.tolist() == value.tolist()
    for value, found in zip(values, load_plain(tmp_path / "x.pt", tensors=True)["samples"][0], strict=True):
        assert type(found) is torch.Tensor and found.dtype == value.dtype and found.tolist() == value.tolist()
    assert loaded(tmp_path, [whole.shape, torch.int8]) == [(3, 4), torch.int8]


def test_a_rollout_dump_with_routed_experts_and_arrays_of_log_probs_is_read(tmp_path):
    dumps.write_train(tmp_path, FIRST)
    rows = dumps.sample_rows(FIRST)
    for row in rows:
        row["rollout_routed_experts"] = numpy.zeros((len(row["tokens"]), 2, 2), dtype=numpy.int32)
        row["rollout_log_probs"] = numpy.array(row["rollout_log_probs"])
        row["weight_versions"] = numpy.array([3])
        row["reward"] = numpy.array(1.0)
    path = tmp_path / "rollout_data" / "0.pt"
    path.parent.mkdir()
    torch.save({"rollout_id": 0, "samples": rows}, path)
    found = only([tmp_path])
    assert same(found, FIRST) and list(found.responses) == list(FIRST.responses)
    assert set(found.rewards.tolist()) == {1.0}


def test_arrays_of_anything_but_numbers_are_refused(tmp_path):
    for number, value in enumerate(
        [
            numpy.array([{}, None], dtype=object),
            numpy.array([1 + 2j]),
            numpy.array(["text"]),
            numpy.array([(1, 2.0)], dtype="i4,f8"),
            numpy.array([1.0], dtype=">f8"),
            numpy.array(["2026-01-01"], dtype="M8[D]"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(DataError, match=r"holds a numpy array of dtype .*, which is no plain data"):
            loaded(folder, value)


def test_an_array_of_objects_runs_nothing(tmp_path):
    proof = tmp_path / "ran"
    with pytest.raises(DataError, match="could run code"):
        loaded(tmp_path, numpy.array([Runs(proof)], dtype=object))
    assert not proof.exists()


def test_a_pickle_changes_nothing_for_those_after_it(tmp_path):
    """BUILD sets attributes on whatever stands before it: on what names stand for, too."""
    saved(tmp_path / "a.pt", {"samples": []})
    for name in _names():
        module, _, own = name.rpartition(".")
        for state in (b"}X\x04\x00\x00\x00evilK\x01s", b"N}X\x08\x00\x00\x00__call__K\x01s\x86"):
            rewrite(tmp_path / "a.pt", f"c{module}\n{own}\n".encode() + state + b"b.")
            with pytest.raises(DataError):
                load_plain(tmp_path / "a.pt")
    test_a_rollout_dump_with_routed_experts_and_arrays_of_log_probs_is_read(tmp_path)


RECONSTRUCT = numpy.empty(0).__reduce__()[0]


class Forged:
    """Pickles as an array with any dtype, shape and bytes."""

    def __init__(self, dtype, shape, content):
        self.state = (1, shape, dtype, False, content)

    def __reduce__(self):
        return RECONSTRUCT, (numpy.ndarray, (0,), b"b"), self.state


class ForgedType:
    """Pickles as a dtype of any state."""

    def __init__(self, code, state):
        self.code, self.state = code, state

    def __reduce__(self):
        return numpy.dtype, (self.code, False, True), self.state


OBJECT = numpy.dtype("O")
FORGED = [
    Forged(OBJECT, (1,), b"\0" * 8),
    Forged(OBJECT, (1,), [1]),
    Forged(numpy.dtype("f8"), (2,), b"\0" * 8),
    Forged(numpy.dtype("f8"), (-1,), b"\0" * 8),
    Forged(numpy.dtype("f8"), (2**40, 2**40), b""),
    Forged(numpy.dtype("f8"), (1,), [OBJECT]),
    Forged("f8", (1,), b"\0" * 8),
    Forged(ForgedType("f8", (3, "<", (OBJECT, (1,)), None, None, -1, -1, 63)), (1,), b"\0" * 8),
    Forged(ForgedType("f8", (3, "<", None, ("a",), {"a": (OBJECT, 0)}, 8, 8, 63)), (1,), b"\1" * 8),
    Forged(ForgedType("V8", (3, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 8, 0)), (1,), b"\1" * 8),
]


def test_a_forged_array_is_refused_or_holds_numbers(tmp_path):
    for number, value in enumerate(FORGED):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            found = loaded(folder, value)
        except DataError:
            return
        assert found.dtype == numpy.float64 and found.dtype.fields is None and found.shape == (1,)

"""Dumps are saved as ``torch.save`` saves them."""

from __future__ import annotations

import numpy
import pytest
import torch

from benchmarks.faults.saving import save

VALUES = torch.arange(6.0)
CONTENTS = {
    "lists": {"samples": [{"tokens": [1, 2, 3], "text": "a", "log_probs": [0.5, None], "none": {}}] * 2},
    "an array": {"experts": numpy.arange(12, dtype=numpy.int32).reshape(3, 4), "mean": numpy.float64(0.5)},
    "tensors": {"lists": [1, 2], "all": VALUES, "some": [VALUES[2:], VALUES.int()], "type": torch.float32},
    "a storage": [VALUES.int().untyped_storage()],
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_has_the_bytes_of_torch_save(name, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    torch.save(CONTENTS[name], tmp_path / "theirs" / "0.pt")
    save(CONTENTS[name], tmp_path / "ours" / "0.pt")
    assert (tmp_path / "ours" / "0.pt").read_bytes() == (tmp_path / "theirs" / "0.pt").read_bytes()

"""What the host knows, on a device."""

import numpy as np
import pytest
import torch

from slime_ext.ops import uploads
from slime_ext.ops.uploads import Parcel

KINDS = {
    "bytes": np.array([3, 255, 0], np.uint8),
    "nothing": np.zeros(0),
    "lengths": np.array([5], np.int32),
    "numbers": np.array([2.0, -np.inf]),
    "places": np.array([1 << 40, -7]),
}


def test_numbers_of_every_kind_travel_in_one_copy(monkeypatch):
    copies, plain = [], uploads.host_ints
    monkeypatch.setattr(uploads, "host_ints", lambda *given: copies.append(given) or plain(*given))
    parcel = Parcel(torch.device("cpu"))
    for name, values in KINDS.items():
        parcel.add(name, lambda values=values: values)
    for name, values in KINDS.items():
        got = parcel.take(name).numpy()
        assert np.array_equal(got, values) and got.dtype == values.dtype
    assert len(copies) == 1


def test_what_is_added_later_goes_in_another_copy_and_what_is_there_stays():
    parcel = Parcel(torch.device("cpu"))
    parcel.add("first", lambda: np.array([1, 2]))
    first = parcel.take("first")
    parcel.add("second", lambda: np.array([3]))
    for name in ("first", "second"):
        parcel.add(name, lambda: pytest.fail("made although it is known"))
    assert parcel.take("second").tolist() == [3] and parcel.take("first") is first

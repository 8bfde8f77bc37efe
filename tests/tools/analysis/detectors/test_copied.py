"""Log-probs of the sampler that are copies of the trainer's at the end of some samples."""

from __future__ import annotations

import pytest
import torch

from tests.tools.analysis.detectors.toys import LENGTH, edited, findings, run


def copied(is_copy):
    """The run with the trainer's log-probs at tokens that ``is_copy(rollout, sample, place)`` flags."""

    def edit(r):
        sample, place = r.segments.ids.long(), r.segments.within
        return {"behavior": torch.where(is_copy(r, sample, place), r.proximal, r.behavior)}

    return edited(run(), edit)


@pytest.mark.parametrize("begin", [1, LENGTH // 2, LENGTH - 8])
def test_ends_of_some_samples_that_are_copies_are_named(begin):
    found = findings(copied(lambda r, sample, place: (sample % 4 == 0) & (place >= begin)))
    assert set(found) == {"equal_columns"} and found["equal_columns"].severity == "warning"
    assert "in 25% of the samples" in found["equal_columns"].title


@pytest.mark.parametrize(
    "is_copy",
    [
        lambda r, sample, place: (sample % 4 == 0) & (place < LENGTH - 1),  # equal until something differs
        lambda r, sample, place: sample % 4 == 0,  # an engine that computes as the trainer does
        lambda r, sample, place: (sample % 4 > 0) | (place >= 8),  # and newer weights from a place on
        lambda r, sample, place: torch.rand(r.size, generator=torch.Generator().manual_seed(0)) < 0.4,
    ],
)
def test_sides_that_compute_alike_are_no_copies_of_the_ends(is_copy):
    assert "equal_columns" not in findings(copied(is_copy))

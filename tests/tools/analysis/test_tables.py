"""Sums by index, by sample and in order are those of plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.mixed import ENDS, octave_of
from slime_ext.tools.analysis.tables import Rows, earlier, in_order, sum_of, tabulated
from tests.tools.analysis.rollouts import rollout


@pytest.mark.parametrize("largest", [1, 3, 1000, 1 << 40, 1 << 62])  # the last do not fit beside a place
@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_keys_are_sorted_and_equal_ones_keep_their_order(largest, count):
    keys = torch.randint(-largest, largest, (count,), generator=torch.Generator().manual_seed(count))
    ordered, places = in_order(keys)
    wanted = sorted(range(count), key=lambda i: int(keys[i]))  # stable, as list.sort is
    assert places.tolist() == wanted
    assert ordered.tolist() == [int(keys[i]) for i in wanted]
    before = [keys[:i].tolist().count(key) for i, key in enumerate(keys.tolist())]
    assert earlier(keys).tolist() == before


@pytest.mark.parametrize("run", [1, 8])  # tokens with one index, which are summed first if they are many
def test_a_pair_of_rows_has_the_sums_of_both_bit_by_bit(run):
    generator = torch.Generator().manual_seed(run)
    index = torch.randint(0, 6, (200,), generator=generator).repeat_interleave(run)  # 5: counts nowhere
    rows = torch.randn(5, len(index), dtype=torch.float64, generator=generator)
    pairs = {(0, 4): torch.complex(rows[0], rows[4]), (3, 2): torch.complex(rows[3], rows[2])}
    sums = tabulated(index, Rows.of(rows, pairs), 5)
    assert sums.equal(tabulated(index, rows, 5))
    exact = [[math.fsum(row[index == at].tolist()) for row in rows] for at in range(5)]
    assert torch.allclose(sums, torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [(3, 3), (2, 4), (4, 2), (0, 2), (2, 0)])
def test_tables_add_up_row_by_row_into_a_new_table(rows):
    a, b = (torch.arange(2.0 * n, dtype=torch.float64).view(n, 2) - 1 for n in rows)
    given = a.tolist(), b.tolist()
    padded = [one + [[0.0, 0.0]] * (max(rows) - len(one)) for one in given]
    wanted = [[x + y for x, y in zip(*pair, strict=True)] for pair in zip(*padded, strict=True)]
    total = sum_of(a, b)
    assert total.tolist() == wanted and total.dtype == torch.float64
    total += 1
    assert (a.tolist(), b.tolist()) == given
    zero = torch.tensor([-0.0], dtype=torch.float64)
    assert not sum_of(zero, zero).signbit()


def test_the_octave_of_a_size_is_the_number_of_ends_that_it_reaches():
    exact = torch.tensor([0.0, *ENDS, *(-end for end in ENDS), 700.0, 1e-30])
    sizes = torch.cat([exact, exact * (1 + 2**-22), exact * (1 - 2**-22)])
    assert octave_of(sizes).tolist() == [sum(abs(x) >= end for end in ENDS) for x in sizes.tolist()]


def test_samples_are_summed_one_by_one_and_empty_ones_have_nothing():
    one = rollout(versions=torch.arange(3).repeat(40)[: rollout().size] - 1)
    samples = [values.tolist() for values in one.log_ratio.split(list(one.lengths))]
    assert one.sums([one.log_ratio])[0].tolist() == pytest.approx([math.fsum(values) for values in samples])
    flagged = [any(values) for values in one.mask.split(list(one.lengths))]
    assert one.samples_with(one.mask).tolist() == flagged
    oldest = [min(values.tolist(), default=-1) for values in one.versions.split(list(one.lengths))]
    measured = one.oldest_versions().tolist()
    assert [-1 if math.isnan(version) else version for version in measured] == oldest

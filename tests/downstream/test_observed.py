"""``init`` alone on real hosts: our metrics, and the host's loss and gradient to the bit.

``HOSTS=path/to/hosts pytest tests/downstream/test_observed.py``
"""

from __future__ import annotations

import pytest

from slime_ext import presets
from slime_ext.core import metrics
from tests.core.metrics.test_statistics import accumulated
from tests.downstream.host_loss import samples
from tests.downstream.layouts import VARIANT_LAYOUTS

pytestmark = [pytest.mark.slow]


def wanted():
    """The metrics of the harness's samples, in float64."""
    batch = [
        {
            "proximal": s.proximal.tolist(),
            "behavior": s.behavior.tolist(),
            "target": s.proximal.tolist(),
            "mask": s.mask.tolist(),
            "advantage": s.advantage.tolist(),
            "host_loss": s.advantage.tolist(),
        }
        for s in samples()
    ]
    return metrics.scalars(accumulated(presets.get("metrics_only"), batch))


@pytest.mark.parametrize("layout", VARIANT_LAYOUTS)
def test_loss_and_gradient_are_the_hosts_and_the_metrics_ours(measured, layout):
    cases = measured[f"beside, {layout}"]
    assert len(cases) >= 6
    for alone, observed in zip(cases[::2], cases[1::2], strict=True):
        assert (observed["loss"], observed["gradient"]) == (alone["loss"], alone["gradient"])
        assert observed["metrics"] == alone["metrics"]
        assert observed["ours"] == pytest.approx(wanted(), rel=1e-5, abs=1e-7)

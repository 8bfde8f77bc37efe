"""Metrics of an optimizer step from sufficient statistics: counts, sums, maxima and a histogram that add up
over micro-batches and ranks. docs/metrics.md lists the names."""

from slime_ext.metrics.accumulator import Accumulator, Totals
from slime_ext.metrics.layout import Layout
from slime_ext.metrics.measure import Measured, measure
from slime_ext.metrics.names import METRICS, PREFIX
from slime_ext.metrics.readings import curves, scalars

__all__ = [
    "METRICS",
    "PREFIX",
    "Accumulator",
    "Layout",
    "Measured",
    "Totals",
    "curves",
    "measure",
    "scalars",
]

"""Metrics of an optimizer step from sufficient statistics: counts, sums, maxima and a histogram that add up
over micro-batches and ranks. docs/metrics.md lists the names."""

from slime_ext.lazily import exported

FILES = {
    "Accumulator": "accumulator",
    "Layout": "layout",
    "METRICS": "names",
    "Measured": "measure",
    "PREFIX": "names",
    "Totals": "totals",
    "curves": "readings",
    "scalars": "readings",
}
__getattr__, __dir__ = exported(__name__, FILES)

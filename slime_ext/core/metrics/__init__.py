"""Metrics of an optimizer step from sufficient statistics: counts, sums, maxima and a histogram that add up
over micro-batches and ranks. docs/metrics.md lists the names."""

from slime_ext.core.lazy_attributes import lazy_attributes

FILES = {
    "METRICS": "names",
    "Measured": "measure",
    "MetricsLayout": "layout",
    "PREFIX": "names",
    "Totals": "totals",
    "curves": "names",
    "reduce": "totals",
    "scalars": "names",
}
__getattr__, __dir__ = lazy_attributes(__name__, FILES)

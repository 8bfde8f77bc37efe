"""Computes the metrics of an optimizer step from sufficient statistics.

These are counts, sums, maxima and a histogram, which can be combined over micro-batches and ranks.
docs/metrics.md lists the names of the metrics.
"""

from slime_ext.core.lazy_attributes import lazy_attributes

FILES = {
    "METRICS": "names",
    "MetricsLayout": "layout",
    "PREFIX": "names",
    "StepSums": "measure",
    "Totals": "totals",
    "curves": "names",
    "reduce": "totals",
    "scalars": "names",
}
__getattr__, __dir__ = lazy_attributes(__name__, FILES)

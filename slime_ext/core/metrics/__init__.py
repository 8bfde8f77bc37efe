"""Computes the metrics of an optimizer step from sufficient statistics.

These are counts, sums, maxima and a histogram, which can be combined over micro-batches and ranks.
docs/metrics.md lists the names of the metrics.
"""

"""Sums over the tokens of a run: mismatch, curves, statistics of the detectors, what-if of corrections."""

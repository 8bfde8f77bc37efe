"""A reward function with a fault, for the tests to name by path."""

from __future__ import annotations


def score(args, sample, **more):
    return float("nan")

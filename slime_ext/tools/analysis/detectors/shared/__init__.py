"""Holds what detectors share: the definition of a detector, ages of weights, tests of sampling and growth."""

"""Holds one module for each finding, with the name of the finding; see ``shared.detector.Detector``."""

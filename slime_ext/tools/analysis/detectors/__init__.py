"""One module for each finding, named as it: see ``shared.detector.Detector``."""

"""What several detectors need: what a detector is, ages of weights, tests of sampling, growth over a run."""

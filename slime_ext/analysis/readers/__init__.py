"""Dumps of slime, of the embedded launcher, and JSONL, as a stream of ``DumpedRollout``."""

"""Reads dumps of slime and miles, and JSONL, as a stream of ``DumpedRollout``."""

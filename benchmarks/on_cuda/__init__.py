"""Measures what only a machine with CUDA can show, in one command: ``bash benchmarks/cuda.sh``."""

"""Runs slime and miles, unedited and end to end, on a machine without CUDA.

Small stand-ins (`stand_ins`) replace CUDA, NCCL and Transformer Engine in every process of such a run, and in
no other process. Everything else is the host's code.
"""

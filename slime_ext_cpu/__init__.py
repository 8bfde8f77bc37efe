"""slime and miles, unedited, end to end on a machine without CUDA.

CUDA, NCCL and Transformer Engine are replaced by small stand-ins (`stand_ins`), installed in every process of
such a run and in no other. Everything else is the host's own code.
"""

"""slime and miles, unedited, end to end on a machine without CUDA.

Where a cluster has CUDA, NCCL and Transformer Engine, here are small replacements (`stand_ins`), installed in
every process of such a run and in no other; all else is the host's own code.
"""

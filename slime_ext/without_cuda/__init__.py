"""slime and miles, unedited, end to end on a machine without CUDA: stand-ins, and a driver for the host's loop.

What CUDA, NCCL and Transformer Engine are there, small replacements are here (`stand_ins`), installed in every
process of such a run and in no other; all else is the host's own code.
"""

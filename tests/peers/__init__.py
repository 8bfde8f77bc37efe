"""Other systems' corrections, run from the pinned wheels of the package index beside ours.

    python -m tests.peers.wheels     # brings the wheels, 40 MB, into build/peers
    python -m tests.peers            # compares, and prints a table

A peer is a module with

    NAME      of the system, as ``slime-ext convert --from`` takes it
    VERSIONS  the releases that it runs
    block     a generator of random numbers and a release -> random settings of that release
    loss      settings, a batch and a release -> the loss of the optimizer step, by its own functions

Only the functions that correct and average are run, unchanged except for annotations and decorators: what
they import would start engines.
"""

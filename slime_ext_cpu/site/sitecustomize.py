"""Installs the stand-ins when a Python process of a run without CUDA starts. Other processes are unchanged.

`driver.py` puts this folder on PYTHONPATH and sets the variables. Ray's actors and SGLang's children inherit
them. SLIME_EXT_INSTALL names additional modules whose `install` is called.
"""

import os

if os.environ.get("SLIME_EXT_WITHOUT_CUDA") == "1":
    from importlib import import_module

    from slime_ext_cpu import fork_server, processes, stand_ins

    processes.mark_semaphores()
    stand_ins.find_torchvision()
    fork_server.hand_over()
    stand_ins.install()
    for name in os.environ.get("SLIME_EXT_INSTALL", "").split():
        import_module(name).install()

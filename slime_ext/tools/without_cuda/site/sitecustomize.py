"""Installs the stand-ins at the start of every Python process of a run without CUDA, and of no other.

`driver.py` puts this folder on PYTHONPATH and sets the variable; Ray's actors and SGLang's children inherit
both.
"""

import os
import sys

if os.environ.get("SLIME_EXT_WITHOUT_CUDA") == "1":
    from slime_ext.tools.without_cuda import fork_server, stand_ins

    sys.path.append(f"{sys.prefix}/torchvision")  # of install.py; no other process may see it
    fork_server.hand_over()
    stand_ins.install()
    if "SLIME_EXT_REHEARSE_EVENTS" in os.environ:
        from slime_ext.tools.rehearsal import observe

        observe.install()
    if "SLIME_EXT_TRACKING" in os.environ:
        from slime_ext.tools.without_cuda import tracking

        tracking.install()

"""SGLang's files in /dev/shm carry the mark of the run, by which they are removed when it has ended.

SGLang 0.5.23 (srt/managers/load_snapshot.py) leaves them where it is killed, and names them by a random id.
"""

from __future__ import annotations

import os
from types import ModuleType

from slime_ext.tools.without_cuda.processes import MARK


def mark_names(module: ModuleType) -> None:
    """Puts the mark into the names that `shm_path_for` gives."""
    name = module.shm_path_for

    def shm_path_for(ipc_name: str) -> str:
        return name(ipc_name).removesuffix(".shm") + f"_{os.environ.get(MARK, '')}.shm"

    module.shm_path_for = shm_path_for

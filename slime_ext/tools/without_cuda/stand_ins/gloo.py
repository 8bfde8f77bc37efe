"""gloo for NCCL in the process group of trainer and engines, over which weights are pushed.

miles 2b5b7fc (utils/distributed_utils.py:35) and slime make that group with the backend "nccl"; the group of
the trainers alone is chosen by --distributed-backend gloo. There, torch's version is compared as text ("2.13"
>= "2.6" is false), so an option has the name of torch < 2.6.
"""

from __future__ import annotations

from types import ModuleType


def use_gloo(module: ModuleType) -> None:
    """Makes a group of gloo where the host asks for one of NCCL."""
    make, new_group = module.init_process_group, module._new_process_group_helper

    def init_process_group(backend: str | None = None, **options: object) -> object:
        return make(backend="gloo" if backend == "nccl" else backend, **options)

    def _new_process_group_helper(*args: object, pg_options: object = None, **options: object) -> object:
        return new_group(*args, **{"backend_options": pg_options, **options})

    module.init_process_group = init_process_group
    module._new_process_group_helper = _new_process_group_helper

"""Collectives of torch 2.13 under their new names, for the hosts' process groups that can be destroyed and
made anew.

slime and miles (utils/reloadable_process_group.py, ReloadableProcessGroup) hand each collective of the
torch of their images to the group inside, by name. torch 2.13 calls `all_gather_single` where those called
`_allgather_base`; without a method of that name the wrapper itself is asked, which has no backend. Context
parallelism gathers with it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

NAMES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)


def add_names(module: ModuleType) -> None:
    """Gives the host's class a method for each new name that it lacks."""
    for name in NAMES:
        if name not in vars(module.ReloadableProcessGroup):
            setattr(module.ReloadableProcessGroup, name, functools.partialmethod(_handed_on, name))


def _handed_on(self: Any, name: str, *args: object, **options: object) -> object:
    return getattr(self.group, name)(*args, **options)

"""Stand-ins that let runs stand side by side and collectives find their group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime_ext.launcher.rollout.processes import MARK
from slime_ext.without_cuda.stand_ins.free_ports import start_at_own_range
from slime_ext.without_cuda.stand_ins.process_groups import NAMES, add_names


def test_each_run_looks_for_ports_in_a_range_of_its_own(monkeypatch):
    starts = set()
    for mark in ("a", "b", "c"):
        monkeypatch.setenv(MARK, mark)
        misc = SimpleNamespace(
            get_free_port=lambda start_port=10000, consecutive=1: (start_port, consecutive)
        )
        start_at_own_range(misc)
        (start, _), (again, count) = misc.get_free_port(), misc.get_free_port(start_port=15000, consecutive=3)
        assert start == again and count == 3 and misc.get_free_port(start_port=start + 7)[0] == start + 7
        starts.add(start)
    assert len(starts) == 3 and all(20000 <= start < 32768 for start in starts)


def test_a_reloadable_group_hands_on_the_new_names():
    class Group:
        def __init__(self, group):
            self.group = group

        def all_to_all_single(self):
            return "the host's own"

    add_names(SimpleNamespace(ReloadableProcessGroup=Group))
    inner = SimpleNamespace(**{name: lambda *args, name=name: (name, args) for name in NAMES})
    assert Group(inner).all_to_all_single() == "the host's own"
    assert Group(inner).all_gather_single(1, 2) == ("all_gather_single", (1, 2))


def test_torch_still_calls_these_names():
    """Where torch renames them again, this fails, and the hosts' groups need the new ones."""
    distributed = pytest.importorskip("torch.distributed.distributed_c10d")
    from inspect import getsource

    assert "group.all_gather_single(" in getsource(distributed)
    assert set(NAMES) <= set(dir(distributed.ProcessGroup))

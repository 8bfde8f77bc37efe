"""Stand-ins that let runs stand side by side and collectives find their group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime_ext.tools.without_cuda.stand_ins.free_ports import VARIABLE, own_range, start_at_own_range
from slime_ext.tools.without_cuda.stand_ins.process_groups import NAMES, add_names


def test_each_run_looks_for_ports_in_a_range_that_no_other_has(monkeypatch):
    with own_range() as first, own_range() as second, own_range() as third:
        assert len({first, second, third}) == 3
        for own in (first, second, third):
            monkeypatch.setenv(VARIABLE, str(own))
            misc = SimpleNamespace(
                get_free_port=lambda start_port=10000, consecutive=1: (start_port, consecutive)
            )
            start_at_own_range(misc)
            assert misc.get_free_port() == (own, 1) and 20000 <= own < 32768
            assert misc.get_free_port(start_port=15000, consecutive=3) == (own, 3)
            assert misc.get_free_port(start_port=own + 7) == (own + 7, 1)
    with own_range() as again:
        assert again == first


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

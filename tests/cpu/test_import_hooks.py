"""Hooks run around a module's execution, once, and never where the module is only looked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from slime_ext_cpu.import_hooks import ImportHooks, around


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    (tmp_path / "hooked_module.py").write_text("import sys\nevents = list(sys.events)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "events", [], raising=False)
    found = ImportHooks()
    found.install()
    yield found
    sys.meta_path.remove(found)
    sys.modules.pop("hooked_module", None)


def test_before_and_after_run_once_around_the_execution(hooks):
    hooks.add("before", "hooked_module", lambda module: sys.events.append("before"))
    hooks.add("after", "hooked_module", lambda module: sys.events.append(list(module.events)))
    importlib.util.find_spec("hooked_module")
    assert sys.events == []
    module = importlib.import_module("hooked_module")
    assert sys.events == ["before", ["before"]]
    importlib.reload(module)
    assert len(sys.events) == 2


def test_a_function_is_put_around_another():
    class Owner:
        def total(self, a, b):
            """Of two."""
            return a + b

    @around(Owner, "total")
    def doubled(total, self, *args):
        return 2 * total(self, *args)

    assert Owner().total(1, 2) == 6 and Owner.total.__doc__ == "Of two."

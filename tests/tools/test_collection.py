"""Tests the pause of the search for reference cycles."""

from __future__ import annotations

import gc

import pytest

from slime_ext.tools.collection import importing, paused


@pytest.mark.parametrize("was_on", [True, False])
def test_pause_ends_as_it_began(was_on):
    before = gc.isenabled()
    try:
        gc.enable() if was_on else gc.disable()
        with pytest.raises(KeyError), paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is was_on
    finally:
        gc.enable() if before else gc.disable()


def test_modules_loaded_before_exempt_nothing():
    before = gc.get_freeze_count()
    with importing("sys"):
        assert not gc.isenabled()
    assert gc.get_freeze_count() == before

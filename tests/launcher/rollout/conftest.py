"""The stand-in server of each test, and the shared real one."""

from __future__ import annotations

import pytest

from tests.launcher.engine import sglang_engine  # noqa: F401  (a fixture)
from tests.launcher.rollout.stand_in import StandIn


@pytest.fixture
def stand_in():
    server = StandIn()
    yield server
    server.close()

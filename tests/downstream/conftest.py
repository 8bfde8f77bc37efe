"""The hosts that the environment names, and what their own loss gives in every layout, once for each host."""

from __future__ import annotations

import pytest

from tests.downstream import layouts
from tests.downstream.checkouts import named


@pytest.fixture(scope="session", params=named())
def host(request):
    """A checkout of slime or miles."""
    return request.param


@pytest.fixture(scope="session")
def measured(host):
    """What every job of ``layouts.every_job`` gave, by its name."""
    return layouts.measured_on(host, layouts.every_job(host))

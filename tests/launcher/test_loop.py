"""What the loop asks of functions that flags name, without an engine."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime_ext.launcher.loop import Loop

METRICS = {"perf/rollout_time": 1.0}


def says_yes(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    """As slime has it: True, the rollout is logged."""
    return True


@pytest.mark.parametrize(
    ("path", "is_logged"),
    [(None, False), (f"{__name__}.says_yes", True), ("slime_ext.host.log_rollout", False)],
)
def test_a_function_that_logs_the_rollout_itself_suppresses_the_launchers_own(path, is_logged):
    loop = object.__new__(Loop)
    loop.args = Namespace(custom_rollout_log_function_path=path)
    assert loop._log_rollout(0, [], dict(METRICS)) is is_logged

#!/usr/bin/env bash
# ClearML reports NaN and infinity as 0, with one line in its log, so a KL that has become NaN is drawn as a perfect one.
# Two calls choose another number than 0.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" clearml==2.1.12
export CLEARML_CACHE_DIR=$folder/cache CLEARML_CONFIG_FILE=$folder/clearml.conf CLEARML_LOG_LEVEL=ERROR
touch "$CLEARML_CONFIG_FILE"
run - <<'PYTHON' 2> errors
import json
from importlib.metadata import version
from pathlib import Path

from clearml import Logger, Task
from recorded import expect

KL = [0.1, float("nan"), float("inf"), -float("inf"), 0.2]


def reported(name: str) -> list[float]:
    """Returns the values that ClearML writes for a series, in the order of their steps."""
    task = Task.init("project", name, auto_connect_frameworks=False, auto_resource_monitoring=False)
    for step, value in enumerate(KL):
        task.get_logger().report_scalar("kl", "kl", value, step)
    folder = Path(task.get_offline_mode_folder())
    task.close()
    lines = folder.joinpath("metrics.jsonl").read_text().splitlines()
    events = [event for line in lines if line for event in json.loads(line)]
    return [event["value"] for event in sorted(events, key=lambda event: event["iter"])]


Task.set_offline(True)
plain = reported("as it is")
Logger.set_reporting_nan_value(-1e9)
Logger.set_reporting_inf_value(1e9)
chosen = reported("with other numbers")
print("clearml", version("clearml"), "values reported:", KL)
print("  values written:                  ", plain)
print("  with set_reporting_nan/inf_value:", chosen)
expect("NaN and infinity are written as 0", plain == [0.1, 0, 0, 0, 0.2])
expect("the two calls choose other numbers", chosen[1] == -1e9 and abs(chosen[2]) == 1e9)
PYTHON

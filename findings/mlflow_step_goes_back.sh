#!/usr/bin/env bash
# The value of a metric that a run of MLflow shows is that of its largest step. After a restart from an older checkpoint
# it is a value that was thrown away, until the new steps pass it. NaN is neither above nor below a bound.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" mlflow==3.17.2
export MLFLOW_TRACKING_URI=sqlite:///runs.db MLFLOW_DISABLE_TELEMETRY=true
run - <<'PYTHON' 2>/dev/null
import math

import mlflow
from recorded import expect

with mlflow.start_run() as run:
    for step, reward in ((0, 0.1), (100, 0.2), (200, 0.0), (110, 0.3), (120, 0.4)):  # restarted from 100 after 200
        mlflow.log_metric("reward", reward, step=step)
    for step, k3 in enumerate((0.001, math.nan)):
        mlflow.log_metric("k3", k3, step=step)
client = mlflow.MlflowClient()
shown = client.get_run(run.info.run_id).data.metrics
history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "reward")]


def found(query: str) -> int:
    """Returns the number of runs that a query finds."""
    return len(client.search_runs([run.info.experiment_id], query))


print("mlflow", mlflow.__version__, "reward by step, in the order of logging:", history)
print("  the run shows", shown)
expect("the run shows the reward of step 200", shown["reward"] == 0.0)
expect("and so do filters", found("metrics.reward < 0.05") == 1 and found("metrics.reward > 0.3") == 0)
expect("the history has all in the order of logging", [step for step, _ in history] == [0, 100, 200, 110, 120])
expect("NaN is shown", math.isnan(shown["k3"]))
expect("and is neither above nor below a bound", found("metrics.k3 > 0") + found("metrics.k3 <= 0") == 0)
PYTHON

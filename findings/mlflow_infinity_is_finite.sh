#!/usr/bin/env bash
# MLflow's database keeps infinity as the largest float64, which is finite. NaN stays NaN.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" mlflow==3.17.2
export MLFLOW_DISABLE_TELEMETRY=1 GIT_PYTHON_REFRESH=quiet
run - 2>errors <<'PYTHON' || { tail -3 errors; exit 1; }
import math
import sys

import mlflow
from recorded import expect

mlflow.set_tracking_uri("sqlite:///runs.db")
with mlflow.start_run() as run:
    for step, value in enumerate((1.0, math.inf, -math.inf, math.nan)):
        mlflow.log_metric("ratio", value, step=step)
history = [m.value for m in mlflow.MlflowClient().get_metric_history(run.info.run_id, "ratio")]
print("mlflow", mlflow.__version__)
print("logged 1, infinity, -infinity, NaN; read", history)
expect("infinity is the largest float64", history[1] == sys.float_info.max)
expect("-infinity is the lowest", history[2] == -sys.float_info.max)
expect("so both are finite", all(map(math.isfinite, history[1:3])))
expect("NaN is NaN", math.isnan(history[3]))
PYTHON

#!/usr/bin/env bash
# A single NaN makes a metric's minimum, maximum and mean in the summary of Weights & Biases NaN for good.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" wandb==0.31.0
WANDB_SILENT=true run - <<'PYTHON'
import math

import wandb
from recorded import expect

run = wandb.init(project="finding", mode="offline")
run.define_metric("k3", summary="last,min,max,mean")
run.define_metric("finite", summary="last,min,max,mean")
for value in (1.0, 5.0, float("nan"), 2.0):
    run.log({"k3": value} | ({} if math.isnan(value) else {"finite": value}))
summary = {name: dict(run.summary[name]) for name in ("k3", "finite")}
run.finish()
print("wandb", wandb.__version__, "logged 1, 5, NaN, 2, and the same without the NaN:")
for name, values in summary.items():
    print(f"  {name:7}", values)
expect("min, max and mean are NaN", all(math.isnan(summary["k3"][name]) for name in ("min", "max", "mean")))
expect("last is the last value", summary["k3"]["last"] == 2)
expect("without the NaN the maximum is 5", summary["finite"]["max"] == 5)
PYTHON

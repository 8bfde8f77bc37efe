#!/usr/bin/env bash
# Ray Data returns the rows of map_batches in the order in which blocks are done, not in their own: rewards that are
# matched with prompts by position belong to other ones. preserve_order keeps the order.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 pandas==3.1.1 pyarrow==26.0.1 ray==2.60.0
export RAY_AUTH_MODE=disabled
run - <<'PYTHON' 2> errors
import shutil
import time
from pathlib import Path

import numpy as np
import ray
import ray.data
from recorded import expect

BLOCKS, DONE = 4, Path("done").resolve()


def score(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Ends for the first block 5 s after it has ended for the others, as it does if an answer there is long."""
    if batch["id"][0] == 0:
        deadline = time.time() + 300
        while len(list(DONE.iterdir())) < BLOCKS - 1 and time.time() < deadline:
            time.sleep(0.1)
        time.sleep(5)
    else:
        DONE.joinpath(str(batch["id"][0])).touch()
    return {"prompt": batch["id"]}


ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
context = ray.data.DataContext.get_current()
context.enable_progress_bars = False
orders = {}
for context.execution_options.preserve_order in (True, False):
    shutil.rmtree(DONE, ignore_errors=True)
    DONE.mkdir()
    scored = ray.data.range(8, override_num_blocks=BLOCKS).map_batches(score, batch_size=None)
    orders[context.execution_options.preserve_order] = [row["prompt"] for row in scored.take_all()]
print("ray", ray.__version__, "prompts 0 to 7 after map_batches; the first block ends last:")
for preserve_order, order in orders.items():
    print(f"  preserve_order={preserve_order}:", [int(prompt) for prompt in order])
expect("no row is lost", sorted(orders[False]) == list(range(8)))
expect("the first block comes last", orders[False][-2:] == [0, 1])
expect("with preserve_order the order is kept", orders[True] == list(range(8)))
ray.shutdown()
PYTHON

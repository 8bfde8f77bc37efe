#!/usr/bin/env bash
# In some tasks of reasoning-gym, no answer at all is worth 0.01, and in others 0.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" reasoning-gym==0.1.25
run - <<'PYTHON'
from importlib.metadata import version

import reasoning_gym
from recorded import expect

print("reasoning-gym", version("reasoning-gym"), "scores of no answer, of an empty one and of the right one:")
scores = {}
for task in ("chain_sum", "gcd", "countdown", "fraction_simplification"):
    data = reasoning_gym.create_dataset(task, size=1, seed=1)
    scores[task] = [float(data.score_answer(answer, data[0])) for answer in (None, "", data[0]["answer"])]
    print(f"  {task:24}", scores[task])
expect("chain_sum and gcd give 0, 0, 1", scores["chain_sum"] == scores["gcd"] == [0, 0, 1])
expect("countdown and fraction_simplification give 0.01, 0.01, 1",
       scores["countdown"] == scores["fraction_simplification"] == [0.01, 0.01, 1])
PYTHON

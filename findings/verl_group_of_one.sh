#!/usr/bin/env bash
# An answer without others of its group has its raw reward as advantage in verl's GRPO and RLOO. The vectorized RLOO,
# which should differ in speed only, gives 0.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch verl==0.9.1
run - <<'PYTHON' 2> errors
from importlib.metadata import version

import numpy as np
import torch
from recorded import expect
from verl.trainer.ppo import core_algos

mask = torch.ones(5, 3)
rewards = torch.zeros(5, 3)
rewards[:, -1] = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0])
groups = np.array(["first"] * 4 + ["second"], dtype=object)
print("verl", version("verl"), "advantages of rewards 1, 0, 0, 0 of one group, and of 1 in a group of its own:")
alone = {}
for name in ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized"):
    estimator = core_algos.get_adv_estimator_fn(name)
    advantages, _ = estimator(token_level_rewards=rewards.clone(), response_mask=mask, index=groups)
    alone[name] = advantages[-1, 0].item()
    print(f"  {name}:", *(f"{advantage:.2f}" for advantage in advantages[:, 0].tolist()))
expect("alone, a reward of 1 is an advantage of 1", all(
    abs(alone[name] - 1) < 1e-4 for name in ("grpo", "grpo_vectorized", "rloo")))
expect("and 0 in the vectorized RLOO", alone["rloo_vectorized"] == 0)
PYTHON

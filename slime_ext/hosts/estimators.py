"""Lists the values of --advantage-estimator in slime and miles.

People look for them among the corrections. It imports nothing, because ``check`` reads them before torch.
"""

from __future__ import annotations

ESTIMATORS = (
    *("grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("on_policy_distillation", "reinforce", "flash_reinforce", "rloo"),
)

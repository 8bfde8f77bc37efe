"""Arguments of any host, and what follows from them. Imports nothing: the commands read it without torch."""

from __future__ import annotations

from typing import Any


class OptionalArgs:
    """Arguments of any host; one that it does not have is None."""

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name, None)


def steps_per_rollout(args: Any) -> int:
    """Optimizer steps that a rollout is cut into, from --num-steps-per-rollout or from the batch sizes; one
    where --use-dynamic-global-batch-size (slime v0.2.2 to v0.2.4, miles) makes a step of whatever there is.

    >>> from types import SimpleNamespace
    >>> sizes = {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 64}
    >>> steps_per_rollout(SimpleNamespace(**sizes))
    4
    >>> steps_per_rollout(SimpleNamespace())
    1
    """
    a = OptionalArgs(args)
    if a.use_dynamic_global_batch_size:
        return 1
    if a.num_steps_per_rollout:
        return int(a.num_steps_per_rollout)
    sizes = (a.rollout_batch_size, a.n_samples_per_prompt, a.global_batch_size)
    return max(1, sizes[0] * sizes[1] // sizes[2]) if all(sizes) else 1

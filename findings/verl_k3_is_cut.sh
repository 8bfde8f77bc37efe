#!/usr/bin/env bash
# verl cuts the KL penalty low_var_kl (k3) at 10. A token whose log-prob is more than 2.6 nats below the reference's
# has a penalty of 10 and no gradient, so nothing pulls it back.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch verl==0.9.1
run - <<'PYTHON' 2> errors
from importlib.metadata import version

import torch
from recorded import expect
from verl.trainer.ppo.core_algos import kl_penalty

below = torch.tensor([0.5, 1.0, 2.0, 2.6, 2.7, 4.0])


def penalty(name: str) -> tuple[list[float], list[float]]:
    """Returns the penalty and its gradient for tokens whose log-probs are this far below the reference's."""
    logprobs = -below.clone()
    logprobs.requires_grad_()
    values = kl_penalty(logprobs, torch.zeros(len(below)), name)
    values.sum().backward()
    return values.tolist(), logprobs.grad.tolist()


print("verl", version("verl"), "nats below the reference:", *(f"{value:.1f}" for value in below.tolist()))
seen = {name: penalty(name) for name in ("low_var_kl", "low_var_kl+", "kl")}
for name, (values, gradient) in seen.items():
    print(f"  {name} is", *(f"{value:.2f}" for value in values), "with gradient", *(f"{g:.2f}" for g in gradient))
values, gradient = seen["low_var_kl"]
expect("up to 2.6 nats the gradient grows", gradient[:4] == sorted(gradient[:4], reverse=True) and gradient[3] < -12)
expect("from 2.7 nats on the penalty is 10 and its gradient 0", values[4:] == [10, 10] and gradient[4:] == [0, 0])
expect("low_var_kl+ has a gradient there", all(g < -2 for g in seen["low_var_kl+"][1][4:]))
PYTHON

#!/usr/bin/env bash
# numpy arrays from Ray's object store are read-only, but torch.from_numpy gives a tensor that writes into the store: an
# operation in place changes the object for all tasks, with one warning of torch. A stored tensor comes as a copy.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 ray==2.60.0
export RAY_AUTH_MODE=disabled
run - <<'PYTHON' 2> errors
import numpy as np
import ray
import torch
from recorded import expect


@ray.remote
def centre(rewards: np.ndarray) -> float:
    """Subtracts 1 in place, and returns the first reward."""
    tensor = torch.from_numpy(rewards)
    tensor -= 1
    return tensor[0].item()


@ray.remote
def centre_copy(rewards: np.ndarray) -> float:
    tensor = torch.tensor(rewards)
    tensor -= 1
    return tensor[0].item()


@ray.remote
def centre_tensor(rewards: torch.Tensor) -> float:
    rewards -= 1
    return rewards[0].item()


def three_times(task, stored: object) -> list[float]:
    """Runs a task three times with the same object, and returns its results and the object's first value at the end."""
    reference = ray.put(stored)
    return [ray.get(task.remote(reference)) for _ in range(3)] + [float(ray.get(reference)[0])]


ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
is_writable = ray.get(ray.put(np.zeros(10, np.float32))).flags.writeable
print("ray", ray.__version__, "torch", torch.__version__, "three tasks subtract 1 from 0, and the object afterwards:")
seen = {size: three_times(centre, np.zeros(size, np.float32)) for size in (10, 1_000_000)}
copied = three_times(centre_copy, np.zeros(10, np.float32))
tensors = three_times(centre_tensor, torch.zeros(10))
print("  torch.from_numpy:", seen)
print("  torch.tensor:    ", copied, " a stored tensor:", tensors)
expect("the array is read-only for numpy", not is_writable)
expect("each task sees what the earlier ones subtracted", all(x == [-1, -2, -3, -3] for x in seen.values()))
expect("with a copy, or a stored tensor, it does not", copied == tensors == [-1, -1, -1, 0])
ray.shutdown()
PYTHON

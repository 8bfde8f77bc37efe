#!/usr/bin/env bash
# Where a checkpoint lacks a weight, Megatron-LM raises an error, and the Megatron-LM in the wheel of miles goes
# on with what the model had there.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch megatron-core==0.16.1 psutil==7.2.2
run -m pip --disable-pip-version-check install -qq --no-compile --no-deps --target miles miles-rl==0.0.2
cat > finding.py <<'PYTHON'
import os

import megatron.core
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from recorded import expect
from torch.distributed.checkpoint.api import CheckpointException


def shard(name, tensor, **options):
    return ShardedTensor.from_rank_offsets(name, tensor, replica_id=0, **options)


if __name__ == "__main__":
    # Megatron-LM asks for the CUDA device, also where it works with CPU tensors alone.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *device: None
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    os.mkdir("checkpoint")
    dist_checkpointing.save({"first": shard("first", torch.ones(4))}, "checkpoint")
    try:
        loaded = dist_checkpointing.load({"second": shard("second", torch.full((4,), 7.0))}, "checkpoint")
        result = str(loaded["second"].tolist())
    except CheckpointException:
        result = "an error"
    print("megatron-core", megatron.core.__version__, "a checkpoint without the weight, into a weight of 7:", result)
    wanted = os.environ["EXPECTED"]
    expect(f"the result is {wanted}", result == wanted)
PYTHON
EXPECTED="an error" run finding.py 2> errors
rm -r checkpoint
export PYTHONPATH=$PWD/miles:$PYTHONPATH
EXPECTED="[7.0, 7.0, 7.0, 7.0]" run finding.py 2> errors

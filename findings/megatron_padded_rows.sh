#!/usr/bin/env bash
# A checkpoint of Megatron-LM whose vocabulary is padded less than the model's is loaded without an error, and
# the rows that it does not have become 0, not what the model had there.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch megatron-core==0.16.1 psutil==7.2.2
cat > finding.py <<'PYTHON'
import os

import megatron.core
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from recorded import expect


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
    saved = {"embedding": shard("embedding", torch.ones(40, 4), allow_shape_mismatch=True)}
    dist_checkpointing.save(saved, "checkpoint")
    model = torch.full((48, 4), 7.0)
    loaded = dist_checkpointing.load({"embedding": shard("embedding", model, allow_shape_mismatch=True)}, "checkpoint")
    rows = loaded["embedding"][:, 0]
    print("megatron-core", megatron.core.__version__, "saved 40 rows of 1, loaded into 48 rows of 7:")
    print("  rows 38 to 47:", rows[38:].tolist())
    expect("the first 40 rows are the checkpoint's", bool((rows[:40] == 1).all()))
    expect("the other 8 are 0", bool((rows[40:] == 0).all()))
PYTHON
run finding.py 2> errors

#!/usr/bin/env bash
# In the last batch of an epoch, accelerate's gather_for_metrics keeps as many rows as there are samples left, whatever
# the rows are. Of a tensor with a row per token it keeps the first tokens only, without an error.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 accelerate==1.15.0
cat > program.py <<'PYTHON'
import os
from importlib.metadata import version

import torch
from accelerate import Accelerator
from recorded import expect
from torch import distributed, multiprocessing

RANKS, SAMPLES, BATCH, TOKENS = 2, 10, 4, 3


def main(rank: int, folder: str) -> None:
    store = distributed.FileStore(os.path.join(folder, "store"), RANKS)
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    accelerator = Accelerator(cpu=True)
    data = [torch.tensor(float(i)) for i in range(SAMPLES)]
    samples, tokens, padded = [], [], []
    for batch in accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=BATCH)):
        samples.append(accelerator.gather_for_metrics(batch))
        tokens.append(accelerator.gather_for_metrics(batch.repeat_interleave(TOKENS)))
        padded.append(accelerator.gather_for_metrics(batch[:, None].expand(-1, TOKENS).contiguous()))
    if rank == 0:
        counts = [[len(batch) for batch in seen] for seen in (samples, tokens, padded)]
        print("accelerate", version("accelerate"), f"{RANKS} ranks, {SAMPLES} samples of {TOKENS} tokens, by batch:")
        print(f"  samples {counts[0]}, tokens {counts[1]}, padded rows {counts[2]}")
        print("  tokens of the last batch:", tokens[-1].tolist())
        expect("the batches have 8 and 2 samples", counts[0] == [8, 2])
        expect("they have 24 and 2 tokens, where 6 would be right", counts[1] == [24, 2])
        expect("the tokens of the last sample are missing", tokens[-1].tolist() == [8, 8])
        expect("with a row per sample all are there", torch.cat(padded).numel() == SAMPLES * TOKENS)
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": str(RANKS)}
    multiprocessing.spawn(main, (os.getcwd(),), RANKS)
PYTHON
run program.py 2> errors

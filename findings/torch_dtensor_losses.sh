#!/usr/bin/env bash
# A loss of a DTensor whose rows are sharded is averaged within each rank first. The gradient of mse_loss,
# huber_loss and smooth_l1_loss is too large by the number of ranks, and the mean of cross_entropy is another one if
# labels are ignored.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
cat > losses.py <<'PYTHON'
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from recorded import expect
from torch import distributed
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

RANKS = 2
LOSSES = (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.l1_loss, F.binary_cross_entropy_with_logits)


def both(loss, mesh, values, targets) -> tuple[torch.Tensor, ...]:
    """Returns a loss and its gradient of plain tensors, and then those of DTensors with sharded rows."""
    seen = []
    for wrap, unwrap in (
        (torch.clone, torch.clone),
        (lambda x: distribute_tensor(x, mesh, [Shard(0)]), lambda x: x.full_tensor()),
    ):
        leaf = wrap(values).requires_grad_()
        result = loss(leaf, wrap(targets))
        result.backward()
        seen += [unwrap(result.detach()), unwrap(leaf.grad)]
    return tuple(seen)


def main(rank: int, folder: str) -> None:
    store = distributed.FileStore(os.path.join(folder, "store"), RANKS)
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    mesh = init_device_mesh("cpu", (RANKS,))
    lines = [f"torch {torch.__version__}, {RANKS} ranks, 8 values, of plain tensors and of DTensors:"]
    torch.manual_seed(0)
    values, targets = torch.randn(8), torch.rand(8)
    factors = {}
    for loss in LOSSES:
        plain, plain_gradient, sharded, gradient = both(loss, mesh, values, targets)
        factor = (gradient / plain_gradient).mean().item()
        lines.append(f"  {loss.__name__}: loss {plain:.4f} and {sharded:.4f}, gradient {factor:.2f} times as large")
        factors[loss.__name__] = round(factor, 3) if torch.allclose(plain, sharded) else None
    logits, labels = torch.randn(4, 6), torch.tensor([-100, 1, 2, 3])
    plain, _, sharded, _ = both(F.cross_entropy, mesh, logits, labels)
    lines.append(f"  cross_entropy, 1 of 4 labels ignored: loss {plain:.4f} and {sharded:.4f}")
    empty = torch.tensor([-100, -100, 2, 3])
    nan = both(F.cross_entropy, mesh, logits, empty)[2]
    lines.append(f"  cross_entropy, all labels of one rank ignored: loss {nan:.4f}")
    if rank == 0:
        print(*lines, sep="\n")
        expect("losses are equal, and the gradients of three are twice as large", factors == {
            "mse_loss": 2, "huber_loss": 2, "smooth_l1_loss": 2, "l1_loss": 1, "binary_cross_entropy_with_logits": 1})
        expect("the mean over kept labels is another one", abs(plain - sharded) > 0.01)
        expect("it is NaN if one rank has no label", nan.isnan().item())
        Path("done").touch()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (os.getcwd(),), RANKS)
PYTHON
run losses.py 2> errors
test -e done

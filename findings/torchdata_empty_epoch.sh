#!/usr/bin/env bash
# A StatefulDataLoader that is restored from the state after an epoch's last batch gives an epoch without batches
# first. A loop over a fixed number of epochs then trains one epoch less, or divides by 0 batches.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 torchdata==0.11.0
run - <<'PYTHON'
import torchdata
from recorded import expect
from torchdata.stateful_dataloader import StatefulDataLoader


def loader() -> StatefulDataLoader:
    return StatefulDataLoader(list(range(8)), batch_size=2)


def epochs_after(batches: int) -> list[int]:
    """Returns the lengths of three epochs of a loader that is restored from the state after some batches."""
    first, restored = loader(), loader()
    for _, _ in zip(range(batches), first):
        state = first.state_dict()
    restored.load_state_dict(state)
    return [len(list(restored)) for _ in range(3)]


print("torchdata", torchdata.__version__, "an epoch has 4 batches; number of batches in the epochs that follow:")
for batches in (2, 3, 4):
    print(f"  after a checkpoint at batch {batches}:", epochs_after(batches))
expect("after batch 3 the epoch has its last batch", epochs_after(3) == [1, 4, 4])
expect("after the last batch an empty epoch comes first", epochs_after(4) == [0, 4, 4])
PYTHON

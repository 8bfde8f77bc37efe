#!/usr/bin/env bash
# A Lightning run that is resumed in the middle of an epoch goes on with the number of the next batch, but with the
# data of the first one. The samples that were trained before are trained again, and as many at the end of the epoch
# never.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 lightning==2.6.6
run - <<'PYTHON' 2> errors
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from recorded import expect
from torch.utils.data import DataLoader


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.seen.append((number, batch.flatten().int().tolist()))
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(checkpoint: Path | None) -> list[tuple[int, list[int]]]:
    """Returns the numbers and samples of the batches of one epoch, or of what is left of it after a checkpoint."""
    model = Model()
    saver = ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **({"enable_checkpointing": False} if checkpoint else {"callbacks": [saver]}),
    )
    trainer.fit(model, DataLoader(torch.arange(8.0)[:, None], batch_size=2), ckpt_path=checkpoint)
    return model.seen


whole = trained(None)
(middle,) = Path("checkpoints").glob("*step=2.ckpt")
rest = trained(middle)
print("lightning", lightning.__version__)
print("  an epoch:", *whole)
print("  after a checkpoint at step 2:", *rest)
expect("an epoch has each sample once", whole == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5]), (3, [6, 7])])
expect("the rest has the numbers 2 and 3, and the first four samples", rest == [(2, [0, 1]), (3, [2, 3])])
PYTHON

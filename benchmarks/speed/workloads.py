"""Makes the batches on which speed is measured, and the floor under every figure."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def lengths_of(name: str) -> list[int]:
    """Returns the response lengths of a workload."""
    torch.manual_seed(0)
    if name == "a":
        return (torch.rand(512).pow(6) * 16200 + 64).int().tolist()
    if name == "c":
        return (torch.rand(4096) * 128 + 64).int().tolist()
    return {"b": [8192] * 64, "d": [131072], "e": [131072] * 64}[name]


class Batch(SimpleNamespace):
    """The same random tokens in every layout that a contender needs."""

    @classmethod
    def of(cls, sizes: list[int]) -> Batch:
        """Draws log-probs that differ by 2e-3 nats, as those of two engines do."""
        total = sum(sizes)
        proximal = -torch.rand(total) * 2
        behavior = proximal + torch.randn(total) * 2e-3
        mask, offsets = torch.ones(total, dtype=torch.int32), torch.tensor([0, *sizes]).cumsum(0).int()
        flat = {"flat_proximal": proximal, "flat_behavior": behavior, "flat_mask": mask}
        return cls(sizes=sizes, offsets=offsets, host_loss=torch.randn(total, requires_grad=True), **flat)

    @cached_property
    def where(self) -> Tensor:
        return torch.arange(max(self.sizes)) < torch.tensor(self.sizes)[:, None]

    def _padded(self, values: Tensor) -> Tensor:
        return torch.zeros(self.where.shape, dtype=values.dtype).masked_scatter(self.where, values)

    @cached_property
    def proximal(self) -> Tensor:
        return self._padded(self.flat_proximal)

    @cached_property
    def behavior(self) -> Tensor:
        return self._padded(self.flat_behavior)

    @cached_property
    def mask(self) -> Tensor:
        return self.where.float()

    def padded(self) -> SimpleNamespace:
        """Pads the lists to new [S, L] tensors, as systems with padded tensors do."""
        names = {"proximal": "train_log_probs", "behavior": "rollout_log_probs", "mask": "loss_masks"}
        return SimpleNamespace(
            **{name: pad_sequence(self._lists[key], batch_first=True) for name, key in names.items()}
        )

    @cached_property
    def _lists(self) -> dict[str, list[Tensor]]:
        flat = {"train_log_probs": self.flat_proximal, "rollout_log_probs": self.flat_behavior}
        return {
            name: list(x.split(self.sizes)) for name, x in (flat | {"loss_masks": self.flat_mask}).items()
        }

    def call(self) -> dict[str, object]:
        """Returns slime's keywords in new lists, so that calls cannot share derived values."""
        lists = {name: list(values) for name, values in self._lists.items()}
        lengths = {"total_lengths": [n + 100 for n in self.sizes], "response_lengths": list(self.sizes)}
        return {"pg_loss": self.host_loss, **lists, **lengths}


FLOOR = """
void T(const float *p, const float *b, const int *m, float *w, float *k, long n) {
    for (long i = 0; i < n; i++) w[i] = (p[i] - b[i]) * m[i];
}
void S(const float *p, const float *b, const int *m, float *w, float *k, long n) {
    for (long i = 0; i < n; i++) { float x = (p[i] - b[i]) * m[i]; w[i] = x; k[i] = -x; }
}
"""


def floor(config: str) -> Callable[[Batch], None]:
    """Returns one pass over the tokens in C.

    It has three reads, and one write (T) or two (S), and allocates nothing.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise ImportError("no C compiler")
    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name, "floor.c"), Path(name, "floor.so")
        source.write_text(FLOOR)
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run([compiler, *flags, str(source)], check=True)
        loop = getattr(ctypes.CDLL(str(library)), config)

    def body(batch: Batch) -> None:
        tensors = batch.flat_proximal, batch.flat_behavior, batch.flat_mask, *_written(batch)
        loop(*(ctypes.c_void_p(t.data_ptr()) for t in tensors), ctypes.c_long(batch.flat_mask.numel()))

    return body


def _written(batch: Batch) -> list[Tensor]:
    if not hasattr(batch, "written"):
        batch.written = [torch.empty_like(batch.flat_proximal) for _ in range(2)]
    return batch.written


def slope(sizes: list[float], times: list[float]) -> float:
    """Returns b of time = a size^b, fitted by least squares in logarithms."""
    x, y = ([math.log(v) for v in values] for values in (sizes, times))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )

"""Non-finite log-probs of an optimizer step, found on the device and named once its statistics are reduced.

On CUDA a look at every hook call would make the host wait. So a call leaves behind how many it found and
where the first was; what is known of the samples stays on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.errors import NonFiniteError
from slime_ext.host.packing import locate
from slime_ext.host.samples import Record
from slime_ext.ops.segments import Segments

POISONED = (
    "the host's surrogate is poisoned by it already; look for an overflow in the trainer's forward pass"
)
KINDS = {
    "train_log_probs": POISONED,
    "cur_log_probs": POISONED,
    "rollout_log_probs": "on_nonfinite: raise asks to stop here",
}
WIDTH = 3  # how many, number of the hook call, index of the token in it


@dataclass
class Poison:
    """The first non-finite log-prob of each kind in one optimizer step on this rank."""

    device: torch.device | str = "cpu"
    calls: list[tuple[Segments, Sequence[Record] | None]] = field(default_factory=list)
    found: Tensor | None = None  # [kinds, WIDTH] float64

    def look(
        self, values: Mapping[str, Tensor | None], segments: Segments, samples: Sequence[Record] | None
    ) -> None:
        """Notes where response tokens are not finite, without waiting for the device.

        Args:
            values: kind -> [T] log-probs; None or absent: not looked at.
            samples: what is known of the call's samples.
        """
        self.calls.append((_outline(segments), samples))
        if not segments.size:
            return
        looked = [values.get(kind) for kind in KINDS]
        fine = [torch.ones_like(segments.mask) if row is None else row.detach().isfinite() for row in looked]
        bad = segments.mask & ~torch.stack(fine)
        call = torch.full_like(bad[:, 0], len(self.calls) - 1, dtype=torch.float64)
        now = torch.stack([bad.sum(1).double(), call, bad.int().argmax(1).double()], 1)
        self.found = now if self.found is None else torch.where(self.found[:, :1] > 0, self.found, now)

    def vector(self) -> Tensor:
        """[kinds x WIDTH] float64, what this rank tells the others."""
        if self.found is None:
            return torch.zeros(len(KINDS) * WIDTH, dtype=torch.float64, device=self.device)
        return self.found.reshape(-1)

    def check(self, per_rank: Sequence[Sequence[float]], rank: int) -> None:
        """Stops on every rank if one of them found something.

        Args:
            per_rank: every rank's ``vector``.
            rank: this one.

        Raises:
            NonFiniteError: naming sample and position where this rank knows them.
        """
        for other in sorted(range(len(per_rank)), key=lambda r: r != rank):
            for kind, (count, call, index) in zip(KINDS, _rows(per_rank[other]), strict=True):
                if count:
                    place = (
                        self._place(int(call), int(index))
                        if other == rank
                        else _elsewhere(other, call, index)
                    )
                    raise NonFiniteError(
                        f"{kind}, {place}: expected a finite log-prob, got NaN or an infinity: {KINDS[kind]}"
                    )

    def _place(self, call: int, index: int) -> str:
        segments, samples = self.calls[call]
        sequence, position = locate(index, segments)
        record = samples[sequence] if samples else None
        named = f"sequence {sequence} of {segments.count} in micro-batch {call}"
        if record is not None and record.index is not None:
            named = f"sample {record.index} ({named})"
        return f"{named}, response token {position}"


def _rows(vector: Sequence[float]) -> list[Sequence[float]]:
    return [vector[i : i + WIDTH] for i in range(0, len(vector), WIDTH)]


def _elsewhere(rank: int, call: float, index: float) -> str:
    return f"data rank {rank}, micro-batch {call:.0f}, token {index:.0f} of it"


def _outline(segments: Segments) -> Segments:
    """What is needed to name a token, without the tensors."""
    return Segments(segments.lengths, segments.pieces, torch.zeros(0, dtype=torch.bool), segments.slots)

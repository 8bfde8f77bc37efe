"""Non-finite log-probs of an optimizer step, found on the device and named once its statistics are reduced.

On CUDA a look at every hook call would make the host wait. So a call leaves behind whether it found any and
where the first was, in five operations; what is known of the samples stays on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.errors import NonFiniteError
from slime_ext.host.packing import CONSEQUENCES, locate
from slime_ext.host.samples import Record
from slime_ext.ops.segments import Segments, host_ints

WIDTH = 3  # whether there is any, number of the hook call, index of the token in it


class Look(NamedTuple):
    """What a hook call leaves behind, of each kind that it had."""

    kinds: tuple[str, ...]
    found: Tensor  # [K] bytes, 1 where a response token is not finite
    first: Tensor  # [K] the first such token


@dataclass
class NonFiniteTracker:
    """The first non-finite log-prob of each kind in one optimizer step on this rank."""

    device: torch.device | str = "cpu"
    calls: list[tuple[Segments, Sequence[Record] | None]] = field(default_factory=list)
    looks: dict[int, Look] = field(default_factory=dict)  # by the number of the call

    def look(
        self, values: Mapping[str, Tensor | None], segments: Segments, samples: Sequence[Record] | None
    ) -> None:
        """Notes where response tokens are not finite, without waiting for the device.

        Args:
            values: kind -> [T] log-probs; None or absent: not looked at.
            samples: what is known of the call's samples.
        """
        kinds = tuple(kind for kind in CONSEQUENCES if values.get(kind) is not None)
        if segments.size and kinds:
            rows = torch.stack([values[kind].detach() for kind in kinds])
            bad = segments.mask & ~(rows.abs() < torch.inf)
            self.looks[len(self.calls)] = Look(kinds, *bad.to(torch.uint8).max(1))  # the first of equals
        self.calls.append((_outline(segments), samples))

    def vector(self) -> Tensor:
        """[kinds x WIDTH] float64, what this rank tells the others."""
        return torch.cat([self._first(kind) for kind in CONSEQUENCES])

    def _first(self, kind: str) -> Tensor:
        """[WIDTH] float64, of the first call that has found something."""
        looks = [
            (call, look.found[place], look.first[place])
            for call, look in self.looks.items()
            for place, seen in enumerate(look.kinds)
            if seen == kind
        ]
        if not looks:
            return torch.zeros(WIDTH, dtype=torch.float64, device=self.device)
        calls, found, first = zip(*looks, strict=True)
        most, which = torch.stack(found).max(0, keepdim=True)
        places = torch.stack([host_ints(calls, most.device), torch.stack(first)])[:, which]
        return torch.cat([most.double(), places[:, 0].double()])

    def check(self, per_rank: Sequence[Sequence[float]], rank: int) -> None:
        """Stops on every rank if one of them found something.

        Args:
            per_rank: every rank's ``vector``.
            rank: this one.

        Raises:
            NonFiniteError: naming sample and position where this rank knows them.
        """
        for other in sorted(range(len(per_rank)), key=lambda r: r != rank):
            for kind, (count, call, index) in zip(CONSEQUENCES, _rows(per_rank[other]), strict=True):
                if count:
                    here = other == rank
                    place = self._place(int(call), int(index)) if here else _elsewhere(other, call, index)
                    why = f"expected a finite log-prob, got NaN or an infinity: {CONSEQUENCES[kind]}"
                    raise NonFiniteError(f"{kind}, {place}: {why}")

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
    return Segments(
        segments.lengths, segments.shards, torch.zeros(0, dtype=torch.bool), segments.shards_per_sequence
    )

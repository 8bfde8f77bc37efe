"""The key ``metrics``: what is measured, and where it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_ext.core.fields import check_fields
from slime_ext.errors import expect


@dataclass(frozen=True)
class Options:
    """What is measured, and where it is written.

    Args:
        enabled: false measures only the three means that the host logs itself, and switches guards off.
        curves: where the curves per position, staleness and probability are written: ``none``, only the
            ``file``, or also the host's ``log``.
        file: path of the file that gets one line of JSON per optimizer step; None: off_policy.jsonl in the
            folder of --save, if there is one.
        differing: whether ``differing_fraction`` is measured. It is also measured if a guard reads it.
        certify: whether each weight push gets a certificate: a line in the output, and the metrics
            ``certified`` and ``certified_k3_kl``.
    """

    enabled: bool = True
    curves: Literal["none", "file", "log"] = "none"
    file: str | None = None
    differing: bool = False
    certify: bool = True

    def __post_init__(self) -> None:
        check_fields("", self)
        for name, idle in {"file": None, "curves": "none", "differing": False}.items():
            value = getattr(self, name)
            is_read = self.enabled or value == idle
            why = f"set enabled: true or remove {name}, because nothing would be written"
            expect(is_read, name, "enabled: true beside it", repr(value), why)
        expect(self.file != "", "file", "a path", "''", "remove the key to use the folder of --save")
        named = self.file is None or ("\0" not in self.file and not self.file.endswith("/"))
        expect(named, "file", "the path of a file", repr(self.file), "write runs/off_policy.jsonl")

"""Which host this process belongs to, and what it does; read from its source, never from a version."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

PASSED = re.compile(r"[\"'](?:cur_log_probs|current_log_probs)[\"']\s*:")
WITHOUT_DATA = re.compile(r"rollout_data_postprocess\(\s*self\.args\s*\)")


@dataclass(frozen=True)
class Host:
    """A launcher with slime's hooks: where it keeps what this library touches."""

    name: str
    package: str  # imported in every process that trains
    loss: str  # has policy_loss_function and get_log_probs_and_entropy
    actor: str  # hands the rollout to --rollout-data-postprocess-path
    model: str  # has train_one_step

    def loss_module(self) -> ModuleType:
        """The module whose globals the policy loss looks its functions up in."""
        return importlib.import_module(self.loss)

    def source(self, module: str) -> str:
        """The text of one of its modules, which need not import here; empty where there is none."""
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return ""
        path = Path(found.origin) if found and found.origin else None
        return path.read_text(encoding="utf-8") if path and path.is_file() else ""

    @property
    def version(self) -> str:
        """As installed; a checkout on PYTHONPATH has none."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return "(a checkout)"

    @property
    def passes_target(self) -> bool:
        """Whether its own hook call carries the target's log-probs (slime PR 2084, or our patch 0001)."""
        return bool(PASSED.search(self.source(self.loss)))

    @property
    def hands_out_data(self) -> bool:
        """Whether --rollout-data-postprocess-path sees the rollout (slime since v0.2.4)."""
        return not WITHOUT_DATA.search(self.source(self.actor))

    @property
    def may_skip_proximal(self) -> bool:
        """Whether a rollout of one optimizer step may go without proximal log-probs (slime since v0.3.0)."""
        return "can_reuse_log_probs_in_loss" in self.source(self.actor)


SLIME = Host(
    "slime",
    package="slime.backends.megatron_utils",
    loss="slime.backends.megatron_utils.loss",
    actor="slime.backends.megatron_utils.actor",
    model="slime.backends.megatron_utils.model",
)
MILES = Host(
    "miles",
    package="miles.backends.training_utils",
    loss="miles.backends.training_utils.loss_hub.losses",
    actor="miles.backends.megatron_utils.actor",
    model="miles.backends.megatron_utils.model",
)
HOSTS = (SLIME, MILES)


def current() -> Host | None:
    """The host whose training code this process has imported; None in the embedded launcher and in tests."""
    return next((host for host in HOSTS if host.package in sys.modules), None)

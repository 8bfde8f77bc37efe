"""Which host this process belongs to, and what it does; read from its source, never from a version."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

log = logging.getLogger("slime_ext")
PASSED = re.compile(r"[\"'](?:cur_log_probs|current_log_probs)[\"']\s*:")
DEFINED = "def policy_loss_function("
WITHOUT_DATA = re.compile(r"rollout_data_postprocess\(\s*self\.args\s*\)")


@dataclass(frozen=True)
class Host:
    """A launcher with slime's hooks: where it keeps what this library touches."""

    name: str
    distributions: tuple[str, ...]  # names under which it is installed
    package: str  # imported in every process that trains
    losses: tuple[str, ...]  # one of them defines policy_loss_function, by release
    actor: str  # hands the rollout to --rollout-data-postprocess-path
    model: str  # has train_one_step

    @property
    def loss(self) -> str:
        """The module that defines policy_loss_function in this release."""
        return next((name for name in self.losses if DEFINED in self.source(name)), self.losses[0])

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
        """Of the distribution that this process imports it from; a checkout on PYTHONPATH has none."""
        for name in self.distributions:
            try:
                distribution = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            if self._is_of(distribution):
                return distribution.version
        return "(a checkout)"

    def _is_of(self, distribution: importlib.metadata.Distribution) -> bool:
        """Whether importing this host finds the distribution's files, installed or linked to (pip -e)."""
        found = importlib.util.find_spec(self.name)
        folders = (
            [Path(place).resolve().parent for place in found.submodule_search_locations] if found else []
        )
        linked = distribution.read_text("direct_url.json") or ""
        installed = Path(distribution.locate_file("")).resolve()
        return any(folder == installed or f'"{folder.as_uri()}"' in linked for folder in folders)

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
    distributions=("slime",),
    package="slime.backends.megatron_utils",
    losses=("slime.backends.megatron_utils.loss",),
    actor="slime.backends.megatron_utils.actor",
    model="slime.backends.megatron_utils.model",
)
MILES = Host(
    "miles",
    distributions=("miles-rl", "miles"),
    package="miles.backends.training_utils",
    losses=("miles.backends.training_utils.loss_hub.losses", "miles.backends.training_utils.loss"),
    actor="miles.backends.megatron_utils.actor",
    model="miles.backends.megatron_utils.model",
)
HOSTS = (SLIME, MILES)


def current() -> Host | None:
    """The host whose training code this process has imported; None in the embedded launcher and in tests."""
    return next((host for host in HOSTS if host.package in sys.modules), None)


def command_line() -> list[str]:
    """The words that started the run: in Ray's actors those of the driver, else this process's own."""
    if (ray := sys.modules.get("ray")) is None:
        return sys.argv
    try:
        own = ray.get_runtime_context().get_job_id()
        return next(job["Entrypoint"] for job in ray._private.state.jobs() if job["JobID"] == own).split()
    except Exception:  # Ray is not started, or keeps it elsewhere: there is no public interface to it
        log.debug("the driver's command line is not known", exc_info=True)
        return sys.argv

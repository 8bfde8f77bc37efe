"""The host around this process: which one it is and what it does, read from its source and never from a
version; and where this process stands among the ranks that train, asked anew each time."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_ext.host.packing import ALONE, Parallel, context_parallel, sum_over
from slime_ext.ops.segments import AllSum, identity

log = logging.getLogger("slime_ext")
PASSED = re.compile(r"[\"'](?:cur_log_probs|current_log_probs)[\"']\s*:")
DEFINED = "def policy_loss_function("
WITHOUT_DATA = re.compile(r"rollout_data_postprocess\(\s*self\.args\s*\)")
MARK = "_wrapped_by_slime_ext"


@dataclass(frozen=True)
class Host:
    """A framework with slime's hooks: where it keeps what this library touches."""

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

    @property
    def is_wrapped(self) -> bool:
        """Whether ``init`` has wrapped its policy loss in this process."""
        return hasattr(getattr(self.loss_module(), "policy_loss_function", None), MARK)

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
        places = found.submodule_search_locations if found else ()
        folders = [Path(place).resolve().parent for place in places]
        linked = distribution.read_text("direct_url.json") or ""
        installed = Path(distribution.locate_file("")).resolve()
        return any(folder == installed or f'"{folder.as_uri()}"' in linked for folder in folders)

    @property
    def passes_target(self) -> bool:
        """Whether its own hook call passes cur_log_probs (slime PR 2084, or our patch)."""
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
    """The host whose training code this process has imported; None outside of a host."""
    return next((host for host in HOSTS if host.package in sys.modules), None)


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts ``around(function)`` in place of a function of a module or a class; again is once."""
    function = getattr(owner, name)
    if not hasattr(function, MARK):
        wrapper = functools.wraps(function)(around(function))
        setattr(wrapper, MARK, function)
        setattr(owner, name, wrapper)


def unwrap(owner: Any, *names: str) -> None:
    """Puts the host's own functions back; for tests."""
    for name in names:
        setattr(owner, name, getattr(getattr(owner, name), MARK, getattr(owner, name)))


def command_line() -> list[str]:
    """The words that started the run: in Ray's actors those of the driver, else this process's own."""
    if (ray := sys.modules.get("ray")) is None:
        return sys.argv
    try:
        if not ray.is_initialized():  # asked for its context it would start a Ray of its own
            return sys.argv
        own = ray.get_runtime_context().get_job_id()
        return next(job["Entrypoint"] for job in ray._private.state.jobs() if job["JobID"] == own).split()
    except Exception:  # Ray keeps it elsewhere: there is no public interface to it
        log.debug("the driver's command line is not known", exc_info=True)
        return sys.argv


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks that train one optimizer step.

    Args:
        is_last_stage: whether it is on the pipeline's last stage, where the loss is.
        dp_rank, dp_size: among the ranks that hold different samples.
        context: among those that share its samples' tokens.
        all_sum: SUM over all of them, data x context parallel: each token once.
    """

    is_last_stage: bool = True
    dp_rank: int = 0
    dp_size: int = 1
    context: Parallel = ALONE
    all_sum: AllSum = identity

    @property
    def place(self) -> tuple[int, int]:
        """Rank and size among the data x context parallel ranks."""
        return self.dp_rank * self.context.size + self.context.rank, self.dp_size * self.context.size


def parallel_state() -> Any:
    """Megatron's parallel state; None where nothing has initialised it."""
    state = sys.modules.get("megatron.core.parallel_state") or sys.modules.get("megatron.core.mpu")
    return state if state is not None and state.model_parallel_is_initialized() else None


def ranks() -> Ranks:
    """What Megatron says; one process alone where Megatron is not initialised."""
    state = parallel_state()
    if state is None:
        return Ranks()
    group = state.get_data_parallel_group(with_context_parallel=True)
    return Ranks(
        # Between passes no virtual stage is at work; older releases of Megatron ask for it by default.
        is_last_stage=state.is_pipeline_last_stage(ignore_virtual=True),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        context=context_parallel(),
        all_sum=sum_over(group) if group.size() > 1 else identity,
    )


def is_logging_rank() -> bool:
    """Whether this is the rank that slime logs from: the first of the last pipeline stage, of one replica."""
    module = sys.modules.get("miles.backends.training_utils.parallel")
    replicas = getattr(getattr(module, "_parallel_state", None), "indep_dp", None)  # miles' --ft-components
    if (replicas is not None and replicas.rank) or ranks().place[0]:
        return False
    state = parallel_state()
    return state is None or state.get_tensor_model_parallel_rank() == 0

"""Finds the host of this process, and its place among the ranks that train.

A host is recognised by three functions that its modules define. In every release of slime, miles and their
forks, the policy loss and the optimizer step have these names and first parameters, in whatever module:

    policy_loss_function(args, batch, logits, sum_of_sample_mean)
    get_log_probs_and_entropy(logits, ...)     a global of the policy loss's module
    train_one_step(args, rollout_id, step_id, data_iterator, model, ...)
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from slime_ext.errors import ConfigError
from slime_ext.host.packing import ALONE, Parallel, context_parallel, parallel_state, sum_over
from slime_ext.ops.segments import AllSum, identity

log = logging.getLogger("slime_ext")
LOSS, TARGET, STEP = "policy_loss_function", "get_log_probs_and_entropy", "train_one_step"
RESPONSES = "get_responses"  # cuts a micro-batch's logits into its samples
SCORE = "forward_only"  # computes a rollout's log-probs with ``TARGET`` before it is trained
TRAIN = "train_actor", "_train_actor"  # scores and trains a rollout; the second name is later miles'
LEADING = {
    LOSS: ("args", "batch", "logits", "sum_of_sample_mean"),
    TARGET: ("logits",),
    STEP: ("args", "rollout_id", "step_id", "data_iterator", "model"),
}
DOCS = "use a release that docs/slime.md lists"
PASSED = {  # keyword of the hook -> pattern for a dictionary with that key in the policy loss's source
    "cur_log_probs": re.compile(r"[\"'](?:cur_log_probs|current_log_probs)[\"']\s*:"),
    "advantages": re.compile(r"[\"']advantages[\"']\s*:"),
}
MARK = "_wrapped_by_slime_ext"


def modules(package: str) -> list[ModuleType]:
    """Lists the loaded modules of a package."""
    loaded = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [module for module in loaded if package == module.__name__.partition(".")[0]]


def definers(name: str, package: str = "") -> list[ModuleType]:
    """Lists the loaded modules that define a function ``name``, in a package or in all."""
    # The name is looked up first: a trainer has loaded 5,000 modules, and nearly all end here.
    defining = (
        module
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        and isinstance(function := module.__dict__.get(name), FunctionType)
        and function.__module__ == module.__name__
    )
    return [module for module in defining if package in ("", module.__name__.partition(".")[0])]


def find_function(package: str, name: str) -> Callable[..., Any] | None:
    """Returns the function ``name`` that a loaded module of a package defines."""
    return next((getattr(module, name) for module in definers(name, package)), None)


class Door(NamedTuple):
    """Names a host function that slime_ext wraps: its module and its parameters."""

    module: str
    parameters: tuple[str, ...]


class HostCode(ABC):
    """Answers questions about a host from its source code.

    The code is that of a running host (``Host``), or of a checkout (``slime_ext.tools.checkout``). Both give
    the same answers.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The host's package, such as slime or miles."""

    @abstractmethod
    def door(self, name: str) -> Door | None:
        """Finds the function ``LOSS``, ``TARGET`` or ``STEP``. Returns None if the host has none."""

    @abstractmethod
    def defines(self, name: str) -> bool:
        """Tells whether a module of the host defines the function ``name``."""

    @abstractmethod
    def accepts(self, dest: str, args: Any) -> bool:
        """Tells whether the host's command line has the flag of an argument."""

    @abstractmethod
    def loss_text(self) -> str:
        """Returns the source of the policy loss's module."""

    @abstractmethod
    def near_texts(self) -> Iterator[str]:
        """Yields the source of each module in the policy loss's package."""

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """Yields the source of each module of the host."""

    @property
    def has_step(self) -> bool:
        """Whether the host trains with ``train_one_step``; FSDP trainers do not."""
        return self.door(STEP) is not None

    def passes(self, keyword: str) -> bool:
        """Tells whether the host itself passes a keyword to the hook.

        Hosts with slime PR 2084 or with our patch pass cur_log_probs.
        """
        return bool(PASSED[keyword].search(self.loss_text()))

    @property
    def carries_versions(self) -> bool:
        """Whether the trainer gets the samples' weight versions (miles, a patched slime)."""
        return any('train_data["weight_versions"]' in text for text in self.texts())

    @property
    def may_skip_proximal(self) -> bool:
        """Whether the host may skip proximal log-probs in a one-step rollout (slime since v0.3.0)."""
        return any("can_reuse_log_probs_in_loss" in text for text in self.near_texts())

    @property
    def replays_top_p(self) -> bool:
        """Whether the host normalises its log-probs over the tokens that --rollout-top-p leaves.

        Its samples then hold these tokens (slime since v0.3.1, vime).
        """
        return any("top_p_token_offsets" in text for text in self.near_texts())

    @property
    def fault(self) -> str:
        """The error message if a function that slime_ext wraps has other first parameters; else empty."""
        for name, wanted in LEADING.items():
            door = self.door(name)
            if door is None and name == STEP:
                continue
            module, parameters = door or (self.loss_module, None)
            if (parameters or ())[: len(wanted)] != wanted:
                got = "none" if parameters is None else f"({', '.join(parameters[: len(wanted)])})"
                return (
                    f"{module}: expected {name}({', '.join(wanted)}, ...), got {got}: this release is not "
                    f"known; {DOCS}"
                )
        return ""

    @property
    @abstractmethod
    def loss_module(self) -> str:
        """The dotted name of the policy loss's module."""


@dataclass(frozen=True)
class Host(HostCode):
    """Represents a framework with slime's hooks, as loaded in this process.

    Args:
        loss: the module in whose globals the policy loss looks its functions up.
        step: the module that defines ``train_one_step``; None if the trainer has no such function (FSDP).
    """

    loss: ModuleType
    step: ModuleType | None

    @property
    def name(self) -> str:
        return self.loss.__name__.partition(".")[0]

    @property
    def loss_module(self) -> str:
        return self.loss.__name__

    @property
    def is_wrapped(self) -> bool:
        """Whether ``init`` has wrapped the host's policy loss in this process."""
        return hasattr(getattr(self.loss, LOSS), MARK)

    def door(self, name: str) -> Door | None:
        module = self.step if name == STEP else self.loss
        function = getattr(module, name, None)
        if module is None or not callable(function):
            return None
        return Door(module.__name__, tuple(inspect.signature(function).parameters))

    def defines(self, name: str) -> bool:
        return find_function(self.name, name) is not None

    def accepts(self, dest: str, args: Any) -> bool:
        return hasattr(args, dest)

    def loss_text(self) -> str:
        return source(self.loss)

    def near_texts(self) -> Iterator[str]:
        room = self.loss.__name__.rpartition(".")[0]
        return (source(module) for name, module in list(sys.modules.items()) if name.startswith(room))

    def texts(self) -> Iterator[str]:
        folders = sys.modules[self.name].__path__
        return (path.read_text("utf-8", "ignore") for f in folders for path in Path(f).rglob("*.py"))


def source(module: ModuleType) -> str:
    """Reads the source of a module. Returns an empty text if it has no Python file."""
    path = getattr(module, "__file__", None)
    return Path(path).read_text("utf-8", "ignore") if path and Path(path).suffix == ".py" else ""


def current() -> Host | None:
    """Finds the host whose training code this process has loaded. Returns None outside a host.

    If several modules define a policy loss (a user's module may), the host is the package that also defines
    the optimizer step.
    """
    losses = definers(LOSS)
    for loss in losses:
        for step in definers(STEP, loss.__name__.partition(".")[0]):
            return Host(loss, step)
    return Host(losses[0], None) if losses else None


def require() -> Host | None:
    """Returns the current host, or None in a process that does not train.

    Raises:
        ConfigError: the process trains without a known host, or the host's functions have other parameters.
    """
    host = current()
    if host is None and parallel_state() is not None:
        raise ConfigError(
            f"slime_ext.host.init: expected a host with {LOSS}({', '.join(LEADING[LOSS])}), got none among "
            f"the {len(sys.modules)} modules loaded here: this host is not known; {DOCS}"
        )
    if host is not None and host.fault:
        raise ConfigError(host.fault)
    return host


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function of a module or a class with ``around(function)``; idempotent."""
    function = getattr(owner, name)
    if not hasattr(function, MARK):
        wrapper = functools.wraps(function)(around(function))
        setattr(wrapper, MARK, function)
        setattr(owner, name, wrapper)


def unwrap(owner: Any, *names: str) -> None:
    """Puts the host's own functions back; for tests."""
    for name in names:
        setattr(owner, name, getattr(getattr(owner, name), MARK, getattr(owner, name)))


def weight_updaters() -> Iterator[type]:
    """Yields the host's classes that push weights to the engines and count the pushes."""
    host = current()
    for module in modules(host.name) if host else ():
        for cls in list(vars(module).values()):
            if isinstance(cls, type) and cls.__module__ == module.__name__ and hasattr(cls, "update_weights"):
                code = getattr(inspect.unwrap(inspect.getattr_static(cls, "__init__")), "__code__", None)
                if code is not None and "weight_version" in code.co_names:
                    yield cls


def trainers() -> Iterator[tuple[type, str]]:
    """Yields each method of ``TRAIN`` with the host's class, or its subclass, that defines it itself.

    Subclasses count, because Ray subclasses an actor's class and wraps each method there.
    """
    host = current()
    for module in modules(host.name) if host else ():
        for cls in list(vars(module).values()):
            if isinstance(cls, type) and cls.__module__ == module.__name__:
                for one in (cls, *_below(cls)):
                    yield from ((one, name) for name in TRAIN if name in vars(one))


def _below(cls: type) -> Iterator[type]:
    """Yields the subclasses of a class, and their subclasses."""
    subclasses: list[type] = type.__subclasses__(cls)
    for each in subclasses:
        yield from (each, *_below(each))


def command_line() -> list[str]:
    """Returns the words that started the run. In a Ray actor they are the driver's."""
    if (ray := sys.modules.get("ray")) is None:
        return sys.argv
    try:
        if not ray.is_initialized():  # asking for its context would start a new Ray
            return sys.argv
        job_id = ray.get_runtime_context().get_job_id()
        words = next(job["Entrypoint"] for job in ray._private.state.jobs() if job["JobID"] == job_id)
        return str(words).split()
    except Exception:  # this is no public interface, so another release of Ray may keep it elsewhere
        log.debug("the driver's command line is not known", exc_info=True)
        return sys.argv


@dataclass(frozen=True)
class Ranks:
    """Places this process among the ranks that train one optimizer step.

    Args:
        is_last_stage: whether this is the pipeline's last stage, which computes the loss.
        dp_rank, dp_size: the place among the ranks that hold different samples.
        context: the place among the ranks that share the tokens of its samples.
        all_sum: SUM over the data x context parallel ranks, which hold each token once.
    """

    is_last_stage: bool = True
    dp_rank: int = 0
    dp_size: int = 1
    context: Parallel = ALONE
    all_sum: AllSum = identity

    @property
    def place(self) -> tuple[int, int]:
        """The rank and the size among the data x context parallel ranks."""
        return self.dp_rank * self.context.size + self.context.rank, self.dp_size * self.context.size


def ranks() -> Ranks:
    """Asks Megatron for this process's place. Without Megatron it is a single process."""
    state = parallel_state()
    if state is None:
        return Ranks()
    group = state.get_data_parallel_group(with_context_parallel=True)
    return Ranks(
        # Between passes there is no current virtual stage, for which older Megatrons would ask by default.
        is_last_stage=state.is_pipeline_last_stage(ignore_virtual=True),
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        context=context_parallel(),
        all_sum=sum_over(group) if group.size() > 1 else identity,
    )


def rank() -> int | None:
    """Returns this process's rank among all that train; None without torch.distributed."""
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def is_logging_rank() -> bool:
    """Tells whether slime logs from this rank.

    That is the first rank of the last pipeline stage, in the first replica.
    """
    (module,) = definers("get_parallel_state", "miles")[:1] or (None,)
    replicas = getattr(getattr(module, "_parallel_state", None), "indep_dp", None)  # miles' --ft-components
    if (replicas is not None and replicas.rank) or ranks().place[0]:
        return False
    state = parallel_state()
    return state is None or state.get_tensor_model_parallel_rank() == 0

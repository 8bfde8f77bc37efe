"""Holds a launch as the rules read it: arguments, configuration, host, and what is unknown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slime_ext.config.load import Loaded
from slime_ext.core.correction import Correction
from slime_ext.core.losses import HostLoss
from slime_ext.errors import cut
from slime_ext.hosts import contract
from slime_ext.hosts.code import LOSS, HostCode
from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import ARGUMENTS

WITHOUT_RATIO = ("reinforce", "flash_reinforce", "rloo")  # estimators whose loss is -A log pi_target
NO_HOST = "no checkout of the host is here; name one with --host DIR"
IDENTITY = Loaded(Correction())  # of a launch in which slime_ext changes no loss
UNREAD = object()  # a sampling parameter's value that is no literal in the source


class UnknownError(Exception):
    """Raised if a rule cannot be judged. The text says why, or what was not checked."""


class ArgumentUnknownError(UnknownError):
    """Raised if a rule reads an argument whose value is not known."""


class HostUnknownError(UnknownError):
    """Raised if a rule needs unknown code, of the host or of a user's init.

    If the error has no text, nothing is printed about it.
    """


class Parameter(NamedTuple):
    """A sampling parameter that a launch passes to the engine.

    Args:
        where: the flag, or ``file:line`` of a rollout function.
        value: its value, or UNREAD.
    """

    where: str
    name: str
    value: Any


class _Arguments:
    """Gives rules the arguments in ARGUMENTS, and ``slime_ext``. One that the host lacks is None."""

    def __init__(self, args: Any, unknown: Collection[str]) -> None:
        self._args, self._unknown = args, unknown

    def __getattr__(self, name: str) -> Any:
        if name not in ARGUMENTS and name != "slime_ext":
            raise KeyError(f"ARGUMENTS: expected {name}, which a rule reads, got none: add it")
        if name in self._unknown:
            raise ArgumentUnknownError(f"{flag_of(name)} is known only where the script runs")
        return getattr(self._args, name, None)


def drops_nothing(name: str) -> None:
    """Answers for a router that is not known: see ``Setup.router_drops``."""


@dataclass(frozen=True)
class Setup:
    """Holds what the rules judge.

    Args:
        args: the host's arguments.
        function: the function of ``slime_ext.tis`` that runs; empty if it is not one of these.
        loaded: the configuration of that function.
        unknown: names of arguments whose values are not known.
        file: the top-level keys of the file of --custom-config-path.
        pg_loss_type: the answer of the host's ``get_pg_loss_type``; None if the host has no such function.
        host: the code of the host; None if it is not known.
        trains: whether this process trains, so that a hook call shows what the host passes to it.
        environment: the environment of the run, which its engines share.
        program: the program that the launch starts; empty if it is not known.
        flag_names: the flags of the launch; empty if they are not known.
        custom_loss: the source of the module of --custom-loss-function-path; None if it is not here.
        custom_generate: as ``custom_loss``, of --custom-generate-function-path.
        sampled_with: the sampling parameters that the user's rollout functions set, if their source is here.
        router_drops: the name of a field of a request -> the version of the installed sglang-router if it
            drops the field, else None. A function, because the answer takes as long as a third of a check.
    """

    args: Any
    function: str = ""
    loaded: Loaded = IDENTITY
    unknown: Collection[str] = ()
    file: Collection[str] = ()
    pg_loss_type: str | None = None
    host: HostCode | None = None
    trains: bool = False
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    program: str = ""
    flag_names: Collection[str] = ()
    custom_loss: str | None = None
    custom_generate: str | None = field(default=None, repr=False)
    sampled_with: Sequence[Parameter] = field(default=(), repr=False)
    router_drops: Callable[[str], str | None] = drops_nothing

    @functools.cached_property
    def flags(self) -> Any:
        """The arguments, for rules to read."""
        return _Arguments(self.args, self.unknown)

    @property
    def correction(self) -> Correction:
        """The correction of slime_ext; the identity if none runs."""
        return self.loaded.correction

    def known_host(self, question: str = "") -> HostCode:
        """Returns the host's code.

        Args:
            question: what the code would tell. The line that says what was not checked has this text.

        Raises:
            HostUnknownError: the host is not known.
        """
        if self.host is None:
            raise HostUnknownError(question and f"{question}: {NO_HOST}")
        return self.host

    @property
    def may_run_init(self) -> bool:
        """Whether the host calls ``slime_ext.host.init``, if a user's init does so."""
        if self.trains or self.flags.custom_megatron_init_path is None:
            return self.trains
        return bool(self.flags.train_backend != "fsdp")  # FSDP never calls the flag's function

    @property
    def hook_correction(self) -> Correction | None:
        """The correction that the hook applies; None if the host calls no such hook."""
        return self.correction if self.function and contract.calls_hook(self.args) else None

    @property
    def steps(self) -> int:
        """Optimizer steps per rollout, from --num-steps-per-rollout or from the batch sizes.

        It is 1 with --use-dynamic-global-batch-size (slime v0.2.2 to v0.2.4, miles), which puts all samples
        of a rollout into one step.
        """
        flags = self.flags
        if flags.use_dynamic_global_batch_size:
            return 1
        if flags.num_steps_per_rollout:
            return flags.num_steps_per_rollout  # type: ignore[no-any-return]
        sizes = (flags.rollout_batch_size, flags.n_samples_per_prompt, flags.global_batch_size)
        return max(1, sizes[0] * sizes[1] // sizes[2]) if all(sizes) else 1

    @property
    def changes_loss(self) -> bool:
        """Whether the correction changes the loss."""
        return self.flags.use_tis is not False

    @property
    def replaces_policy_loss(self) -> bool:
        """Whether the host runs a user's loss that does not call the host's, which alone calls a hook.

        Raises:
            HostUnknownError: the source of the user's loss is not here.
        """
        if self.flags.loss_type != "custom_loss":
            return False
        loss = self.flags.custom_loss_function_path
        if loss and self.custom_loss is None:
            raise HostUnknownError(
                f"whether {cut(loss)} calls {LOSS}, which alone calls the hook: its source is not here"
            )
        return LOSS not in (self.custom_loss or "")

    @property
    def replaces_loss(self) -> bool:
        """Whether a surrogate of slime_ext replaces the host's loss."""
        return self.changes_loss and not isinstance(self.correction.surrogate, HostLoss)

    @property
    def has_ratio(self) -> bool:
        """Whether the host's loss has the factor target / proximal (PPO, GSPO, CISPO).

        REINFORCE, -A log pi_target, has no such factor, and passes the target's log-probs as the proximal's.
        """
        loss_type = self.pg_loss_type or self.flags.pg_loss_type
        if loss_type is None:
            return not (self.flags.use_score_centering or self.flags.advantage_estimator in WITHOUT_RATIO)
        return bool(loss_type != "reinforce")

    @property
    def counts_target_twice(self) -> bool:
        """Whether the target ratio enters twice: once in our weight, once in the host's loss.

        This is harmless in the first optimizer step of a rollout, and wrong from the second step on.
        """
        weighs = self.correction.numerator == "target" and self.correction.sets_weights
        return weighs and self.changes_loss and not self.replaces_loss and self.has_ratio

    @property
    def is_second_step_trained(self) -> bool:
        """Whether the target and the proximal policy can differ."""
        return self.steps > 1 or bool(self.flags.keep_old_actor)

    @property
    def reads_proximal_head(self) -> bool:
        """Whether ``center`` reads the proximal policy's log-probs at the head.

        It does not with a host's REINFORCE, where the proximal policy is the target.
        """
        return self.correction.needs_proximal_head and self.changes_loss and self.has_ratio

"""Metrics and guards once per optimizer step: a wrapper around the host's ``train_one_step``.

slime looks that function up as a global of its model module at every step, and writes the losses that it
returns to its own log, on one rank, under ``train/`` with its own step. So the metrics go where the losses
go: into that dictionary. Nothing after training calls a function that a flag names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_ext.config import read_config
from slime_ext.config.rules import multiplies_target_ratio
from slime_ext.errors import ConfigError, GuardError, NonFiniteError
from slime_ext.guards import Watch
from slime_ext.host import certify, hosts, staleness, step_metrics
from slime_ext.host.configured import correction_of_flags, mapping_of_flags
from slime_ext.host.ranks import ranks, replica
from slime_ext.host.step_file import FILE, StepFile
from slime_ext.host.warnings import warn_once
from slime_ext.metrics.names import PREFIX
from slime_ext.metrics.options import Options

NAME = "train_one_step"
LEADING = ("args", "rollout_id", "step_id", "data_iterator", "model")  # v0.2.0 to 624b824, and miles
MARK = "_measured_by_slime_ext"
TOKENS, SEQUENCES, NONFINITE = (PREFIX + name for name in ("tokens", "sequences", "nonfinite_fraction"))
BROKEN = (
    "rollout_log_probs: expected finite ones, at most 0, got others at {:.2%} of the tokens ({}): they are "
    "rejected and counted in off_policy/nonfinite_fraction; look for what is wrong with the engine"
)
UNUSED = (
    "--custom-tis-function-path: expected a call of it in every optimizer step, got none: the loss in use "
    "(--loss-type) does not call it, and nothing is corrected"
)
log = logging.getLogger("slime_ext")


@dataclass
class Reporter:
    """What is done with a step's metrics; keeps the guards' counts between steps.

    Args:
        folder: where the file goes that ``metrics.file`` does not name; None: no file.
    """

    options: Options = field(default_factory=Options)
    watch: Watch = field(default_factory=Watch)
    folder: str | Path | None = None
    file: StepFile | None = field(init=False)
    warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        folder = Path(self.folder) / FILE if self.folder else None
        path = Path(self.options.file) if self.options.file else folder
        self.file = StepFile(path) if path else None

    @classmethod
    def of(cls, args: Any, folder: str | Path | None = None) -> Reporter:
        """As the ``slime_ext:`` mapping of the arguments says."""
        loaded = read_config(mapping_of_flags(args))
        return cls(loaded.metrics, Watch(loaded.guards), folder)

    def report(self, step: step_metrics.OptimizerStep, where: Mapping[str, int]) -> dict[str, float]:
        """Reduces a step, judges it, writes it to the file; what belongs into the host's log.

        Args:
            where: rollout_id and step_id.

        Raises:
            GuardError: a guard asks to stop.
            NonFiniteError: a non-finite proximal or target log-prob, found on the device.
        """
        scalars, curves = step.reduce()
        first = _is_first()
        if f"{PREFIX}staleness_mean" not in scalars:  # the hook got no versions
            scalars |= {
                PREFIX + name: value for name, value in staleness.of_rollout(where.get("rollout_id")).items()
            }
        if not scalars[TOKENS]:  # of nothing there is no ratio, and nothing to judge
            scalars = {name: value for name, value in scalars.items() if name in (TOKENS, SEQUENCES)}
            if not step.seen:
                warn_once(UNUSED)
        elif self.options.certify:
            scalars |= certify.of_step(scalars, where.get("step_id", 0), is_first=first)
        if first and self.file:
            self.file.add(where, {**scalars, **curves})
        place = ", ".join(f"{name} {value}" for name, value in where.items())
        self._warn_of_broken(scalars.get(NONFINITE, 0.0), place, first)
        self._judge(scalars, place, first)
        return {**scalars, **curves} if self.options.curves == "log" else scalars

    def _warn_of_broken(self, fraction: float, place: str, first: bool) -> None:
        """Once in a run: that there are log-probs which no policy can give."""
        if first and fraction and not self.warned:
            self.warned = True
            log.warning(BROKEN.format(fraction, place))

    def _judge(self, scalars: Mapping[str, float], where: str, first: bool) -> None:
        for alarm in self.watch.look(scalars, where):
            if alarm.action == "stop":
                raise GuardError(alarm.line)
            if alarm.action == "metrics_only":
                step_metrics.leave_loss_alone()
            if first:
                log.warning(alarm.line)


def install() -> bool:
    """Wraps the ``train_one_step`` of the host that this process belongs to; again is once.

    Returns:
        Whether there is one that trains here; the embedded launcher's trainer reports its steps itself.

    Raises:
        ConfigError: the host's function is not that of any release that is known.
    """
    host = hosts.current()
    if host is None:
        return False
    staleness.install()
    certify.install()
    try:
        module = importlib.import_module(host.model)
    except (ImportError, ValueError) as error:
        log.warning(
            "%s: no metrics but the host's own channel, it does not import here: %s", host.model, error
        )
        return False
    wrap(module, host.model)
    return True


def wrap(module: ModuleType, name: str) -> None:
    """Puts the wrapper in place of a module's ``train_one_step``.

    Raises:
        ConfigError: there is none, or one with other parameters.
    """
    function = getattr(module, NAME, None)
    if hasattr(function, MARK):
        return
    leading = tuple(inspect.signature(function).parameters)[: len(LEADING)] if callable(function) else ()
    if leading != LEADING:
        raise ConfigError(
            f"{name}: expected {NAME}({', '.join(LEADING)}, ...), got {', '.join(leading) or 'none'}: this "
            "release is not known; slime_ext.metrics.enabled: false does without the metrics"
        )
    setattr(module, NAME, _measured(function))


def unwrap(module: ModuleType) -> None:
    """Puts the host's own function back; for tests."""
    setattr(module, NAME, getattr(getattr(module, NAME), MARK, getattr(module, NAME)))


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    reporters: dict[int, Reporter] = {}  # one per args object

    @functools.wraps(function)
    def train_one_step(*given: Any, **named: Any) -> Any:
        call = signature.bind(*given, **named).arguments
        args = call["args"]
        if not _trains_policy(call):
            return function(*given, **named)
        _forbid_double_count(args, call["step_id"])
        reporter = reporters.get(id(args)) or Reporter.of(args, getattr(args, "save", None))
        reporters[id(args)] = reporter
        layout = step_metrics.layout_of(args, curves=measures_curves(reporter))
        if layout is None or not reporter.options.enabled:
            return function(*given, **named)
        where = {key: call[key] for key in ("rollout_id", "step_id")}
        with step_metrics.under_way(layout) as step:
            losses, *rest = _explained(step, function, given, named)
            if reporter.options.certify:
                certify.settle()
                certify.note_step(call.get("optimizer"))
            values = report_on_every_stage(reporter, step, where)
        return ({**losses, **values}, *rest)

    setattr(train_one_step, MARK, function)
    return train_one_step


def measures_curves(reporter: Reporter) -> bool:
    """Whether anything would read the curves."""
    curves = reporter.options.curves
    return curves == "log" or (curves == "file" and reporter.file is not None)


def report_on_every_stage(
    reporter: Reporter, step: step_metrics.OptimizerStep, where: Mapping[str, int]
) -> dict[str, float]:
    """``Reporter.report`` on the pipeline's last stage, {} on the others; where it raises, all of them do.

    Raises:
        GuardError, NonFiniteError: on the last stage as ``Reporter.report``; a GuardError of the same line on
            the others, for whoever started the run may see one stage's error alone.
    """
    error, values = None, {}
    if ranks().is_last_stage:
        try:
            values = reporter.report(step, where)
        except (GuardError, NonFiniteError) as found:
            error = found
    reason = step_metrics.share_error_across_stages(str(error or ""))
    if error is not None:
        raise error
    if reason:
        raise GuardError(reason)
    return values


def _forbid_double_count(args: Any, step_id: int) -> None:
    """The flags said one step per rollout; how many there are depends on the rollout where batches vary."""
    correction = correction_of_flags(args) if step_id else None
    if correction is not None and getattr(args, "use_tis", False) and multiplies_target_ratio(correction):
        raise ConfigError(
            f"slime_ext.numerator: expected one optimizer step per rollout beside target and the host's "
            f"surrogate, got step {step_id + 1}: its loss counts target / proximal already; use surrogate: "
            "reinforce"
        )


def _trains_policy(call: Mapping[str, Any]) -> bool:
    """Whether this rank trains the policy, not a critic."""
    return getattr(call["model"][0], "role", "actor") == "actor"


def _explained(step: step_metrics.OptimizerStep, function: Callable[..., Any], given: Any, named: Any) -> Any:
    """The host's step; where it breaks off, what the hook knows of the reason."""
    try:
        return function(*given, **named)
    except RuntimeError as error:
        _name_the_cause(step, error)
        raise


def _name_the_cause(step: step_metrics.OptimizerStep, error: Exception) -> None:
    try:
        step.explain()
    except NonFiniteError as found:
        raise found from error
    except RuntimeError:
        log.debug("the device does not answer any more", exc_info=True)


def _is_first() -> bool:
    """Whether this is the rank that slime logs from: the first of the last pipeline stage, of one replica."""
    if replica() or step_metrics.place_of(ranks())[0]:
        return False
    state = sys.modules.get("megatron.core.parallel_state")
    ready = state is not None and state.model_parallel_is_initialized()
    return not ready or state.get_tensor_model_parallel_rank() == 0

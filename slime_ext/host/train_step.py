"""Metrics and guards once per optimizer step: a wrapper around the host's ``train_one_step``.

slime looks that function up as a global of its model module at every step, and writes the losses that it
returns to its own log, on one rank, under ``train/`` with its own step. So the metrics go where the losses
go: into that dictionary. Nothing after training calls a function that a flag names. ``off_policy.jsonl`` gets
one line of strict JSON per optimizer step, each step once.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_ext.config.load import read_config
from slime_ext.core.correction import Correction
from slime_ext.core.metrics import MetricsLayout
from slime_ext.core.metrics.guards import Watch
from slime_ext.core.metrics.names import PREFIX
from slime_ext.core.metrics.options import Options
from slime_ext.errors import ConfigError, GuardError, NonFiniteError, warn_once
from slime_ext.host import certify, heads, hosts, staleness, step_metrics
from slime_ext.host.configured import correction_of_flags, counts_target_twice, mapping_of_flags
from slime_ext.host.hook import ONLY_MEASURES
from slime_ext.host.rollout_data import joined, read_ahead
from slime_ext.host.step_metrics import OptimizerStep
from slime_ext.host.step_plan import compute_plan, what_couples

FILE = "off_policy.jsonl"
TOKENS, SEQUENCES, NONFINITE = (PREFIX + name for name in ("tokens", "sequences", "nonfinite_fraction"))
BROKEN = (
    "rollout_log_probs: expected finite ones, at most 0, got others at {:.2%} of the tokens ({}): they are "
    "rejected and counted in off_policy/nonfinite_fraction; look for what is wrong with the engine"
)
UNUSED = (
    "--custom-tis-function-path: expected a call of it in every optimizer step, got none: the loss in use "
    "(--loss-type) does not call it, and nothing is corrected"
)
UNSEEN = (
    f"off_policy metrics: expected {hosts.LOSS} in every optimizer step, got none: the loss in use "
    "(--loss-type) is another, and nothing is measured"
)
NOT_AHEAD = (
    "{what}: expected a data_iterator whose micro-batches can be read ahead (offset, get_next), got "
    "{kind}: this host streams them; what is looked up before an optimizer step does not run here"
)
log = logging.getLogger("slime_ext")


@dataclass
class StepFile:
    """Appends a line per step; a run that goes on first loses the lines of the steps that it trains again."""

    path: Path
    is_open: bool = False
    last: tuple[int, ...] = ()

    def add(self, where: Mapping[str, int], values: Mapping[str, float]) -> None:
        """Writes one line; a number that is not finite is null. A file that cannot be written is one warning.

        Args:
            where: what distinguishes the steps, in the order in which they count up.
        """
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = {**where, "time": round(time.time(), 3), **finite}
        try:
            self._append(where, json.dumps(row, allow_nan=False) + "\n")
        except (OSError, ValueError) as error:  # one rank alone stopping would leave the others waiting
            self.is_open = False  # what got half into the file is taken out first
            reason = getattr(error, "strerror", None) or error
            warn_once(
                f"{self.path}: expected a file that can be written, got {reason}: training goes on without "
                "its lines"
            )

    def _append(self, where: Mapping[str, int], line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        place = tuple(where.values())
        if not self.is_open or place <= self.last:  # a host may train a step again that failed
            self._cut(where)
        self.is_open, self.last = True, place
        with self.path.open("a") as file:
            file.write(line)

    def _cut(self, where: Mapping[str, int]) -> None:
        """Takes out the steps from ``where`` on, and a last line that a killed run left unfinished."""
        *lines, unfinished = self.path.read_bytes().split(b"\n") if self.path.is_file() else (b"",)
        kept = [line for line in lines if not _is_redone(line, where)]
        if unfinished or len(kept) < len(lines):
            temporary = self.path.with_name(self.path.name + ".tmp")  # a kill in between leaves the first
            temporary.write_bytes(b"".join(line + b"\n" for line in kept))
            temporary.replace(self.path.resolve())


def _is_redone(line: bytes, where: Mapping[str, int]) -> bool:
    """Whether a line is of this step or a later one; one that is not ours is not."""
    try:
        row = json.loads(line)
        return [row[key] for key in where] >= list(where.values())
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


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
        path = self.options.file or (Path(self.folder) / FILE if self.folder else None)
        self.file = StepFile(Path(path)) if path else None

    @classmethod
    def of(cls, args: Any, folder: str | Path | None = None) -> Reporter:
        """As the ``slime_ext:`` mapping of the arguments says."""
        loaded = read_config(mapping_of_flags(args))
        return cls(loaded.metrics, Watch(loaded.guards), folder)

    @property
    def measures_curves(self) -> bool:
        """Whether anything would read the curves."""
        curves = self.options.curves
        return curves == "log" or (curves == "file" and self.file is not None)

    def report(self, step: step_metrics.OptimizerStep, where: Mapping[str, int]) -> dict[str, float]:
        """Reduces a step, judges it, writes it to the file; what belongs into the host's log.

        Args:
            where: rollout_id and step_id.

        Raises:
            GuardError: a guard asks to stop.
            NonFiniteError: a non-finite proximal or target log-prob, found on the device.
        """
        scalars, curves = step.reduce()
        first = hosts.is_logging_rank()
        if not scalars[TOKENS]:  # of nothing there is no ratio, and nothing to judge
            scalars = {name: value for name, value in scalars.items() if name in (TOKENS, SEQUENCES)}
            if not step.seen:
                warn_once(UNSEEN if step.observes else UNUSED)
        elif self.options.certify:
            scalars |= certify.of_step(scalars, where.get("step_id", 0), is_first=first)
        if first and self.file:
            self.file.add(where, {**scalars, **curves})
        place = ", ".join(f"{name} {value}" for name, value in where.items())
        if first and (fraction := scalars.get(NONFINITE, 0.0)) and not self.warned:
            self.warned = True
            log.warning(BROKEN.format(fraction, place))
        self._judge(scalars, place, first)
        return {**scalars, **curves} if self.options.curves == "log" else scalars

    def _judge(self, scalars: Mapping[str, float], where: str, first: bool) -> None:
        for alarm in self.watch.look(scalars, where):
            if alarm.action == "stop":
                raise GuardError(alarm.line)
            if alarm.action == "metrics_only":
                step_metrics.current.leaves_loss_alone = True
            if first:
                log.warning(alarm.line)

    def report_on_every_stage(
        self, step: step_metrics.OptimizerStep, where: Mapping[str, int]
    ) -> dict[str, float]:
        """``report`` on the pipeline's last stage, {} on the others; where it raises, all of them do.

        Raises:
            GuardError, NonFiniteError: on the last stage as ``report``; a GuardError of the same line on the
                others, for whoever started the run may see one stage's error alone.
        """
        error, values = None, {}
        if hosts.ranks().is_last_stage:
            try:
                values = self.report(step, where)
            except (GuardError, NonFiniteError) as found:
                error = found
        reason = step_metrics.share_error_across_stages(str(error or ""))
        if error is not None:
            raise error
        if reason:
            raise GuardError(reason)
        return values


def install(host: hosts.Host) -> None:
    """Wraps the host's ``train_one_step`` and what pushes its weights; idempotent."""
    staleness.install()
    certify.install()
    if host.step is not None:
        hosts.wrap(host.step, hosts.STEP, _measured)


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    # One per args object, which is held: another one at its address would write into its run's file.
    reporters: dict[int, tuple[Any, Reporter]] = {}

    def train_one_step(*given: Any, **named: Any) -> Any:
        call = signature.bind(*given, **named).arguments
        args = call["args"]
        if getattr(call["model"][0], "role", "actor") != "actor":  # a critic's
            return function(*given, **named)
        if id(args) not in reporters:
            reporters[id(args)] = args, Reporter.of(args, getattr(args, "save", None))
        _, reporter = reporters[id(args)]
        correction = correction_of_flags(args)
        if call["step_id"]:
            _forbid_double_count(args, call["step_id"])
        where = {key: call[key] for key in ("rollout_id", "step_id")}
        with step_metrics.under_way(_opened(call, correction, reporter)) as step:
            try:
                losses, *rest = function(*given, **named)
            except RuntimeError as error:
                _name_the_cause(step, error)
                raise
            if step.layout is None:
                return (losses, *rest)
            if reporter.options.certify:
                certify.settle()
                certify.note_step(call.get("optimizer"))
            values = reporter.report_on_every_stage(step, where)
        return ({**losses, **values}, *rest)

    return train_one_step


def _opened(call: Mapping[str, Any], correction: Correction | None, reporter: Reporter) -> OptimizerStep:
    """The step with what is known of its samples before they are trained."""
    measured = correction or ONLY_MEASURES
    enabled = reporter.options.enabled
    layout = MetricsLayout.of(measured, curves=reporter.measures_curves) if enabled else None
    step, here = OptimizerStep(layout, observes=correction is None), hosts.ranks()
    if not here.is_last_stage:
        return step
    iterator = (call["data_iterator"] or [None])[0]
    if not (hasattr(iterator, "offset") and hasattr(iterator, "get_next")):
        if measured.needs_plan or measured.center is not None:
            what = what_couples(measured) if measured.needs_plan else "center"
            raise ConfigError(NOT_AHEAD.format(what=what, kind=type(iterator).__name__))
        return step
    batches = read_ahead(iterator, call["num_microbatches"])
    identify = staleness.identify(call["rollout_id"])
    if measured.needs_plan:
        rollout = getattr(iterator, "rollout_data", None)
        step.plan = compute_plan(measured, call["args"], batches, here, rollout, identify)
        step.samples = step.plan.samples
    else:
        step.samples = identify(joined(batches))
    if measured.center is not None:
        step.heads = heads.of_step(call["rollout_id"], step.samples, measured.center.top_k)
    return step


def _forbid_double_count(args: Any, step_id: int) -> None:
    """Stops at a second step of a rollout; from flags alone their number is not known where batches vary."""
    if counts_target_twice(args):
        raise ConfigError(
            f"slime_ext.numerator: expected one optimizer step per rollout beside target and the host's "
            f"surrogate, got step {step_id + 1}: its loss counts target / proximal already; use surrogate: "
            "reinforce"
        )


def _name_the_cause(step: step_metrics.OptimizerStep, error: Exception) -> None:
    """Raises what the hook knows of why the host's step broke off."""
    try:
        step.explain()
    except NonFiniteError as found:
        raise found from error
    except RuntimeError:
        log.debug("the device does not answer any more", exc_info=True)

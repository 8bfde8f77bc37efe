"""Wraps the host's ``train_one_step`` to make metrics and run guards once per optimizer step.

slime looks that function up as a global of its model module at every step. It logs the losses that the
function returns on one rank, under ``train/``, with its own step number. So the metrics go into the
dictionary of the losses. ``off_policy.jsonl`` gets one line of strict JSON per optimizer step.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime_ext.core.correction import Correction
from slime_ext.core.metrics.guards import Watch
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.metrics.names import EXACT, PREFIX
from slime_ext.core.metrics.step_file import StepFile, Values
from slime_ext.errors import ConfigError, GuardError, NonFiniteError, warn_once
from slime_ext.host import certify, heads, staleness, step_metrics, wrapping
from slime_ext.host.configured import setup_for
from slime_ext.host.hook import ONLY_MEASURES
from slime_ext.host.memory import Memory
from slime_ext.host.ranks import is_logging_rank, ranks
from slime_ext.host.rollout_data import numbers, read_ahead
from slime_ext.host.step_metrics import OptimizerStep
from slime_ext.host.step_plan import compute_plan, what_couples
from slime_ext.hosts import running
from slime_ext.hosts.code import LOSS, STEP
from slime_ext.hosts.contract import SLIME_FUNCTIONS
from slime_ext.rules.setup import Setup

FILE = "off_policy.jsonl"
TOKENS, SEQUENCES, NONFINITE = (PREFIX + name for name in ("tokens", "sequences", "nonfinite_fraction"))
BROKEN = (
    "rollout_log_probs: expected log-probs above -1000 and at most 0, got other values at {:.2%} of the "
    "tokens ({}): look for a fault of the engine; these tokens are rejected, and "
    "off_policy/nonfinite_fraction counts them; to stop the run at such a token, set "
    "slime_ext.on_nonfinite: raise"
)
UNUSED = (
    "--custom-tis-function-path: expected a call of the function in every optimizer step, got none: use "
    "--loss-type policy_loss, because this loss does not call it, and nothing is corrected"
)
UNMEASURED = (
    f"off_policy metrics: expected a call of {LOSS} in every optimizer step, got none: use --loss-type "
    "policy_loss, because the run has another loss, and nothing is measured"
)
NO_FILE = (
    "slime_ext.metrics.curves: expected --save or metrics.file beside file, got neither, so no curves are "
    "measured: set metrics.file, or use curves: log"
)
TWICE = (  # raised during training, because flags do not give the number of steps if batches vary
    "slime_ext.numerator: expected one optimizer step per rollout beside target and the host's surrogate, "
    "got step {}: use surrogate: reinforce, because the host's loss has the factor target / proximal already"
)
UNWRITTEN = (
    "{}: expected a file that can be written, got {}: make it writable, or name another file in "
    "slime_ext.metrics.file for the next run; training goes on without its lines"
)
log = logging.getLogger("slime_ext")


class Reporter:
    """Logs, writes and judges the metrics of each step, as the ``slime_ext:`` mapping says.

    It keeps the guards' counts between steps.

    Args:
        folder: where the file is written, if ``metrics.file`` names none. None: no file.
    """

    def __init__(self, args: Any, folder: str | Path | None = None) -> None:
        self.setup = setup_for(args)
        self.options, self.watch = self.setup.loaded.metrics, Watch(self.setup.loaded.guards)
        path = self.options.file or (Path(folder) / FILE if folder else None)
        self.file = StepFile(Path(path)) if path else None
        if self.options.curves == "file" and self.file is None:
            warn_once(NO_FILE)
        self.warned = False  # about log-probs that are not finite
        self.leaves_loss_alone = False  # whether a guard has taken the action ``metrics_only``

    def layout(self, correction: Correction) -> MetricsLayout | None:
        """Chooses what is measured: curves only if something reads them. Returns None for nothing."""
        if not self.options.enabled:
            return None
        curves, is_guarded = self.options.curves, not EXACT.keys().isdisjoint(self.watch.guards)
        differing = self.options.differing or is_guarded
        is_read = curves == "log" or (curves == "file" and self.file is not None)
        return MetricsLayout.of(correction, curves=is_read, differing=differing)

    def report(self, step: OptimizerStep, where: Mapping[str, int]) -> dict[str, float]:
        """Ends an optimizer step: reduces its sums, writes a line, runs the guards.

        If the last pipeline stage raises (a guard, a non-finite log-prob), every stage raises the same line,
        because whoever started the run may see the error of one stage alone.

        Returns:
            The metrics for the host's log, empty except on the last pipeline stage.
        """
        error: Exception | None = None
        values: dict[str, float] = {}
        if ranks().is_last_stage:
            try:
                values = self._reported(step, where)
            except (GuardError, NonFiniteError) as raised:
                error = raised
        reason = step_metrics.share_error_across_stages(str(error or ""))
        if reason:
            raise error or GuardError(reason)
        return values

    def _reported(self, step: OptimizerStep, where: Mapping[str, int]) -> dict[str, float]:
        scalars, curves = step.reduce()
        first = is_logging_rank()
        if not scalars[TOKENS]:  # without tokens there are no ratios to report or judge
            scalars = {name: scalars[name] for name in (TOKENS, SEQUENCES)}
            if not step.seen:
                warn_once(UNMEASURED if step.observes else UNUSED)
        elif self.options.certify:
            scalars |= certify.of_step(scalars, where.get("step_id", 0), is_first=first)
        place = ", ".join(f"{name} {value}" for name, value in where.items())
        if first:
            self._write(where, place, scalars, curves)
        for action, line in self.watch.look(scalars, place):
            if action == "stop":
                raise GuardError(line)
            self.leaves_loss_alone |= action == "metrics_only"
            if first:
                log.warning(line)
        return {**scalars, **curves} if self.options.curves == "log" else scalars

    def _write(self, where: Mapping[str, int], place: str, scalars: Values, curves: Values) -> None:
        if self.file:
            try:
                self.file.add(where, {**scalars, **curves})
            except OSError as error:  # if only this rank raised, the others would wait
                warn_once(UNWRITTEN.format(self.file.path, error.strerror))
        if (fraction := scalars.get(NONFINITE)) and not self.warned:
            self.warned = True
            log.warning(BROKEN.format(fraction, place))


def install(host: running.Host) -> None:
    """Wraps the host's ``train_one_step`` and its classes that push weights; idempotent."""
    certify.install()
    if host.step is not None:
        wrapping.wrap(host.step, STEP, _measured)


def _measured(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def train_one_step(*positional: Any, **named: Any) -> Any:
        call = signature.bind(*positional, **named).arguments
        args = call["args"]
        if getattr(call["model"][0], "role", "actor") != "actor":  # a critic's
            return function(*positional, **named)
        reporter = reporter_of(args)
        if call["step_id"] and _refuses_second_step(reporter.setup):
            raise ConfigError(TWICE.format(call["step_id"] + 1))
        where = {key: call[key] for key in ("rollout_id", "step_id")}
        with step_metrics.under_way(_opened(call, reporter.setup.hook_correction, reporter)) as step:
            try:
                losses, *rest = function(*positional, **named)
            except RuntimeError as error:
                _name_the_cause(step, error)
                raise
            certify.count_step()
            if step.layout is None:
                return (losses, *rest)
            if reporter.options.certify:
                certify.settle()
                certify.note_step(call.get("optimizer"))
            return ({**losses, **reporter.report(step, where)}, *rest)

    return train_one_step


# A host's args, and the reporter of the steps that it trains with them.
REPORTERS: Memory[list[tuple[Any, Reporter]]] = Memory(list)


def reporter_of(args: Any) -> Reporter:
    """Returns the reporter of a run, and makes it at the first call."""
    for known, reporter in REPORTERS.value:
        if known is args:
            return reporter
    REPORTERS.value.append((args, Reporter(args, getattr(args, "save", None))))
    return REPORTERS.value[-1][1]


def _refuses_second_step(setup: Setup) -> bool:
    """Tells whether a second step of a rollout is refused. A seed's function gets a warning."""
    is_named = setup.hook_correction is not None and setup.function not in SLIME_FUNCTIONS
    return is_named and setup.counts_target_twice


def _opened(call: Mapping[str, Any], correction: Correction | None, reporter: Reporter) -> OptimizerStep:
    """Opens an optimizer step: identifies its samples, and plans it if the correction needs that."""
    measured = correction or ONLY_MEASURES
    here = ranks()
    step = OptimizerStep(
        reporter.layout(measured),
        observes=correction is None,
        leaves_loss_alone=reporter.leaves_loss_alone,
        parallel=here.context,
    )
    if not here.is_last_stage:
        return step
    iterator = (call["data_iterator"] or [None])[0]
    if not (hasattr(iterator, "offset") and hasattr(iterator, "get_next")):
        if measured.needs_plan or measured.center is not None:
            what = what_couples(measured) if measured.needs_plan else "center"
            raise ConfigError(
                f"{what}: expected a data_iterator whose micro-batches can be read ahead (offset, get_next), "
                f"got {type(iterator).__name__}: use a correction without {what}, because slime_ext cannot "
                "read the samples before they are trained"
            )
        return step
    batch = read_ahead(iterator, call["num_microbatches"])
    step.samples = staleness.samples_of(batch, call["rollout_id"])
    if measured.needs_plan:
        rollout = getattr(iterator, "rollout_data", None)
        plan = compute_plan(
            measured,
            call["args"],
            batch,
            here,
            rollout,
            call["rollout_id"],
            leaves_loss_alone=reporter.leaves_loss_alone,
        )
        step.plan = measured, plan
    if measured.center is not None:
        step.heads = heads.of_step(call["rollout_id"], step.samples, measured.center.top_k)
        if reporter.setup.reads_proximal_head:
            is_moved = call["step_id"] > 0 or bool(getattr(call["args"], "keep_old_actor", False))
            step.proximal_heads = heads.proximal_of(step.samples, is_moved=is_moved)
        step.rollout = getattr(iterator, "rollout_data", step.rollout)
    return step


def _name_the_cause(step: OptimizerStep, error: Exception) -> None:
    """Raises the cause of a failed host step, if the hook has recorded it."""
    try:
        step.tracker.check([numbers(step.tracker.vector())], 0)
    except NonFiniteError as cause:
        raise cause from error
    except RuntimeError:
        log.debug("the device no longer answers", exc_info=True)

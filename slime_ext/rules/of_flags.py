"""Rules of flags that exclude each other, exclude slime_ext, or leave it without effect."""

from __future__ import annotations

from slime_ext.hosts import contract
from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import ARGUMENTS
from slime_ext.rules.rule import HOST, REFUSE, WARN, rule
from slime_ext.rules.setup import Setup

READS_BAND = ("vanilla_tis_function", "icepop_function")
OFF_IN_FILE = (
    "--custom-config-path: expected no key use_tis, or true, beside a correction, got false, which replaces "
    "--use-tis"
)


@rule(REFUSE)
def function_never_called(setup: Setup) -> str | None:
    """The launch names a function of slime_ext, and no flag makes the host call it."""
    if not contract.function_of(setup.flags) or setup.flags.use_tis or setup.flags.get_mismatch_metrics:
        return None
    if "use_tis" in setup.file:
        return f"{OFF_IN_FILE}: remove the key, because the host then never calls the function"
    return (
        "--use-tis: expected on beside --custom-tis-function-path, got off: add --use-tis, because without "
        "it the host never calls the function; for metrics alone, remove --custom-tis-function-path, because "
        "slime_ext.host.init measures without it"
    )


@rule(REFUSE)
def score_centering_beside_function(setup: Setup) -> str | None:
    """The host's score centering is on beside a function of slime_ext."""
    if not (setup.function and setup.flags.use_tis and setup.flags.use_score_centering):
        return None
    return (
        "--use-score-centering: expected the host's own vanilla_tis_function or icepop_function beside it, "
        f"got {setup.flags.custom_tis_function_path}: name one of the two, because the host centers no other "
        "weights, or remove --use-score-centering; slime_ext.host.init measures in both cases"
    )


@rule(HOST)
def score_centering_beside_mismatch_metrics(setup: Setup) -> str | None:
    """The host refuses its mismatch metrics beside its score centering."""
    if not (setup.function and setup.flags.get_mismatch_metrics and setup.flags.use_score_centering):
        return None
    return (
        "--get-mismatch-metrics: expected off beside --use-score-centering, got on: remove "
        "--get-mismatch-metrics, because the host refuses it there; slime_ext.host.init measures without it"
    )


@rule(HOST)
def score_centering_refused(setup: Setup) -> str | None:
    """The host refuses its score centering beside another flag."""
    if not setup.flags.use_score_centering:
        return None
    reducer, estimator = setup.flags.custom_pg_loss_reducer_function_path, setup.flags.advantage_estimator
    top_k = -1 if setup.flags.rollout_top_k is None else setup.flags.rollout_top_k
    refused = {  # flag -> whether the host refuses it, what the host expects, what it gets
        "--use-opsm": (setup.flags.use_opsm, "off", "on"),
        "--use-opd": (setup.flags.use_opd, "off", "on"),
        "--rollout-top-k": (top_k != -1, "-1", f"{top_k:g}"),
        "--custom-pg-loss-reducer-function-path": (reducer, "none", reducer),
        "--advantage-estimator": (estimator in ("gspo", "cispo"), "grpo or reinforce", estimator),
    }
    for flag, (is_refused, wanted, got) in refused.items():
        if is_refused:
            return (
                f"{flag}: expected {wanted} beside --use-score-centering, got {got}: remove one, because the "
                "host refuses the two together"
            )
    return None


@rule(HOST)
def rollout_logprobs_beside_tis(setup: Setup) -> str | None:
    """The host refuses --use-rollout-logprobs beside a correction."""
    if not (setup.flags.use_tis and setup.flags.use_rollout_logprobs and setup.has_ratio):
        return None
    return (
        "--use-rollout-logprobs: expected off beside --use-tis, got on: remove one, because the host refuses "
        "the two together"
    )


@rule(WARN)
def unread_tis_clip(setup: Setup) -> str | None:
    """The function of the launch does not read ``--tis-clip`` or ``--tis-clip-low``."""
    # A flag that has the host's default value looks like a missing flag.
    bounds = {dest: getattr(setup.flags, dest) for dest in contract.BAND}
    bounds = {dest: value for dest, value in bounds.items() if value not in (None, ARGUMENTS[dest].default)}
    reads = READS_BAND + (("off_policy_is_function",) if contract.takes_tis_bounds() else ())
    if not setup.function or setup.function in reads or not bounds:
        return None
    flags = " and ".join(map(flag_of, bounds))
    values = " and ".join(f"{value:g}" for value in bounds.values())
    return (
        f"{flags}: expected none beside {contract.TIS}.{setup.function}, got {values}: remove "
        f"{'both flags' if len(bounds) > 1 else 'the flag'}, because only "
        f"{contract.TIS}.vanilla_tis_function and icepop_function read such bounds; to set a cap, write "
        "truncate: {high: ...} under slime_ext.steps"
    )


@rule(WARN)
def correction_switched_off(setup: Setup) -> str | None:
    """The correction would change the loss, and ``--use-tis`` is off."""
    if not setup.function or setup.correction.is_identity or setup.flags.use_tis:
        return None
    if "use_tis" in setup.file:
        return f"{OFF_IN_FILE}: remove the key, because slime_ext then only measures"
    return "--use-tis: expected on beside a correction, got off, so slime_ext only measures: add --use-tis"


@rule(WARN)
def correction_without_steps(setup: Setup) -> str | None:
    """``--use-tis`` is on, and the correction changes nothing."""
    if not (setup.function and setup.correction.is_identity and setup.flags.use_tis):
        return None
    return (
        "slime_ext.steps: expected a step beside --use-tis, got none, so slime_ext only measures: write a "
        "preset or steps under slime_ext, or remove --use-tis"
    )


@rule(WARN)
def nan_is_not_skipped(setup: Setup) -> str | None:
    """The host skips steps with NaN, and slime_ext stops at the trainer's NaN."""
    if setup.flags.check_for_nan_in_loss_and_grad is not False:
        return None
    return (
        "--no-check-for-nan-in-loss-and-grad: expected off beside slime_ext, got on: remove the flag, "
        "because slime_ext stops the run at a NaN among the trainer's log-probs, even if the host skips such "
        "steps"
    )

"""Says what to do next: which row of the decision table applies to a run, and what its trial would cost."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime_ext import presets
from slime_ext.hosts.contract import INIT_FLAG
from slime_ext.tools import decision
from slime_ext.tools.analysis.document import (
    UNCORRECTED,
    Candidate,
    Effect,
    Finding,
    Numbers,
    Recommendation,
)
from slime_ext.tools.analysis.measures.versions import RECORD
from slime_ext.tools.analysis.readers.flags import count_of
from slime_ext.tools.wording import flags_of

FEW = 100  # sequences; with fewer, one sequence changes the shares below by more than 1%
LAGS = 0.5  # mean age of weights from which a run lags; train_async.py makes 1, and 0 in its first rollout
# Limits of what a correction may cost.
LEAST_KEPT, LEAST_ESS, MOST_CLIPPED, MOST_ONE_SIDED = 0.9, 0.5, 0.2, 0.1
LEAST_SCALE, MOST_SCALE = 0.67, 1.5
STALE = "stale_weights"  # the finding that the sampler's weights lag
NOISY = "quantised"  # the finding that the sampler has lower precision
UNKNOWN = "unexplained"  # the finding that something is wrong, without a cause
TREATED = (STALE, NOISY)  # causes of a distance for which the decision table has a row
# Findings about samples and rewards, which leave the log-probs as they are.
BESIDE_LOG_PROBS = (
    "duplicate_samples",
    "left_out",
    "length_explosion",
    "no_advantage",
    "reward_collapse",
    "selection_bias",
)


def recommend(
    effects: Sequence[Effect],
    total: Numbers,
    findings: Sequence[Finding] = (),
    files: Mapping[str, str] | None = None,
    *,
    rollouts_per_push: int | None = None,
    flags_of_run: Mapping[str, Any] | None = None,
) -> Recommendation:
    """Returns the row of the decision table that applies to a run, and why.

    Args:
        effects: of the evaluated presets, and of the files of ``--config``.
        total: the run's numbers.
        findings: of the run; nothing is recommended while one of them ``must_wait``.
        files: name -> file of ``--config``; these corrections are tried after the table's preset.
        rollouts_per_push: rollouts from one push of weights to the next, as the dumps tell; None: unknown.
        flags_of_run: content of args.json.
    """
    if obstacle := _obstacle(total, findings):
        return obstacle
    flags_of_run = flags_of_run or {}
    rollouts_per_push = rollouts_per_push or count_of(flags_of_run, "update_weights_interval")
    lags = _why_lagging(total, findings, rollouts_per_push)
    is_rounded = _why_rounded(findings, flags_of_run)
    if not lags and (unknown := _why_unknown(total)):
        return _unmade(*unknown)
    row = decision.row_of(total.k3 or 0.0, is_lagging=bool(lags), is_rounded=bool(is_rounded))
    why = lags or is_rounded or "nothing tells that the sampler's weights are older or rounded"
    reason = f"{decision.plain(row.run)} (k3 {_said(total.k3)}; {why})"
    first = row.first.removeprefix(decision.PUSH_OFTEN) if rollouts_per_push == 1 else row.first
    if not row.trial:
        return _uncorrected(reason, "no correction is needed")
    candidates = _candidates(effects, files or {})
    chosen = next((candidate.name for candidate in candidates if candidate.chosen), None)
    if chosen is None:
        costs = [f"{candidate.name} {candidate.reason}" for candidate in candidates]
        dear = "; ".join(costs) or f"{decision.TRIAL} was not evaluated: leave out --presets"
        return _uncorrected(reason, decision.plain(first), dear, candidates=candidates)
    trial = decision.plain(first + row.trial)
    effect = next(effect for effect in effects if effect.name == chosen)
    what = f"{chosen}: {_gain(effect)}"
    return Recommendation(
        name=chosen,
        reasons=(reason, trial, what),
        flags=flags(chosen, (files or {}).get(chosen)),
        candidates=candidates,
    )


def must_wait(finding: Finding) -> bool:
    """Returns whether no correction is recommended before a finding is fixed or understood.

    A correction hides a fault, so its recommendation waits for all faults. Two causes do not hold it back if
    nothing else can be the cause, because the decision table says what to do about them: old weights and
    rounded ones. Neither do warnings about samples and rewards, which leave the log-probs as they are.
    """
    is_open = bool(finding.or_else) or finding.says == "symptom"
    if finding.severity == "error" or (finding.is_fault and is_open):
        return True
    return finding.is_fault and finding.name not in (*TREATED, *BESIDE_LOG_PROBS)


def _obstacle(total: Numbers, findings: Sequence[Finding]) -> Recommendation | None:
    """Returns a recommendation that is not made, if findings or missing data prevent it."""
    waiting = [f for f in findings if must_wait(f)]
    if errors := [f for f in waiting if f.severity == "error"]:
        return _unmade(
            *(f"fix {f.name} first, because {_what_a_correction_does(f)}" for f in errors),
            "then analyse again",
            launch="",
        )
    if any(f.name == UNKNOWN for f in waiting):
        return _unmade(
            f"k3 {_said(total.k3)} has an unknown cause, so a correction might hide a fault, and nobody "
            "knows whether it would help",
            "find the cause first, as the finding says, then analyse again",
        )
    if waiting:
        return _unmade(
            *map(_reason_to_wait, waiting),
            "do first what the finding says, then analyse again",
        )
    if total.tokens == total.nonfinite:
        return _unmade("no response token has finite log-probs of both policies, so nothing can be compared")
    if total.sequences < FEW:
        return _unmade(
            f"too few sequences ({total.sequences}) to recommend anything: analyse at least {FEW}, because "
            "with fewer a single sequence changes the shares by more than 1%",
        )
    return None


def _what_a_correction_does(finding: Finding) -> str:
    """Returns what becomes of an error under a correction: only a part of k3 can be hidden."""
    return "no correction repairs it" if finding.explains is None else "a correction would only hide it"


def _reason_to_wait(finding: Finding) -> str:
    """Returns why a correction is not recommended beside a warning."""
    if finding.or_else:
        return f"{' or '.join((finding.name, *finding.or_else))}: the dump cannot tell which"
    if finding.says == "symptom":
        return f"{finding.name}: it was seen, but it is not known to be the whole cause"
    return f"{finding.name}: a correction would only hide it"


def _why_lagging(total: Numbers, findings: Sequence[Finding], rollouts_per_push: int | None) -> str:
    """Returns what tells that the sampler's weights are older; empty if nothing does."""
    if any(f.name == STALE for f in findings):
        return f"the finding {STALE} says so"
    if (total.staleness or 0) >= LAGS:
        return f"the weights are {_said(total.staleness)} versions old in the mean"
    if (total.least_staleness or 0) >= LAGS:
        return f"the weights are {_between(total)} rollouts old in the mean"
    # train.py pushes after every rollout whatever the flag says; then every age is 0.
    if (rollouts_per_push or 1) > 1 and total.staleness != 0:
        return f"weights are pushed after every {rollouts_per_push} rollouts"
    return ""


def _why_unknown(total: Numbers) -> tuple[str, ...]:
    """Returns why nobody knows whether the sampler's weights are older; empty if it is known."""
    if total.least_staleness is None or (total.most_staleness is not None and total.most_staleness < LAGS):
        return ()
    both = "" if total.most_staleness is not None else ", and analyse rollout 0 as well for an upper bound"
    return (
        f"the weights are {_between(total)} rollouts old in the mean, so nobody knows whether they lag, and "
        f"k3 ({_said(total.k3)}) does not tell what a lag costs",
        f"ages are not in the dumps: {RECORD}{both}",
    )


def _between(total: Numbers) -> str:
    if total.most_staleness is None:
        return f"at least {_said(total.least_staleness)}"
    return f"between {_said(total.least_staleness)} and {_said(total.most_staleness)}"


def _why_rounded(findings: Sequence[Finding], flags_of_run: Mapping[str, Any]) -> str:
    """Returns what tells that the sampler's weights are rounded; empty if nothing does."""
    if name := decision.rounded_by(flags_of_run):
        return f"args.json has {name} {flags_of_run[name]}"
    return f"the finding {NOISY} says so" if any(f.name == NOISY for f in findings) else ""


def _candidates(effects: Sequence[Effect], files: Mapping[str, str]) -> tuple[Candidate, ...]:
    """Returns the table's preset, then the user's files, up to the first that costs little."""
    by_name, candidates = {effect.name: effect for effect in effects}, []
    for name in (decision.TRIAL, *files):
        if name in by_name:
            complaint = cost(by_name[name])
            candidates.append(Candidate(name=name, chosen=not complaint, reason=complaint or "costs little"))
            if not complaint:
                break
    return tuple(candidates)


def flags(name: str, file: str | None = None) -> str:
    """Returns the flags to add to slime's launch command for a preset or a file."""
    if file is not None:
        return " ".join([f"--custom-config-path {file}", *_lacking(file)])
    return flags_of(name, presets.get(name))


def _lacking(file: str) -> list[str]:
    from slime_ext.config.files import read_yaml  # most runs have no file, and the imports take 10 ms
    from slime_ext.config.load import read_config

    config = read_yaml(file)
    wanted = flags_of("correct", read_config(config["slime_ext"]).correction)
    return [
        flag
        for flag in re.findall(r"--\S+(?: [^-]\S*)?", wanted)
        if flag.split()[0].removeprefix("--").replace("-", "_") not in config
    ]


def _unmade(*reasons: str, launch: str = INIT_FLAG) -> Recommendation:
    """Returns that nothing can be recommended yet. The flags of ``launch`` only measure."""
    return Recommendation(name=UNCORRECTED, reasons=reasons, flags=launch, is_made=False)


def _uncorrected(*reasons: str, candidates: Sequence[Candidate] = ()) -> Recommendation:
    """Returns the recommendation to correct nothing. Its flags only measure."""
    return Recommendation(name=UNCORRECTED, reasons=reasons, flags=INIT_FLAG, candidates=tuple(candidates))


def cost(effect: Effect) -> str:
    """Returns why a correction costs too much; empty if it does not."""
    if effect.unavailable:
        return effect.unavailable
    kept = effect.kept_sequences / max(effect.sequences, 1)
    clipped = effect.clipped_tokens / effect.tokens
    complaints = {
        f"would reject {1 - kept:.0%} of the sequences": kept < LEAST_KEPT,
        f"would clip {clipped:.0%} of the weights": clipped > MOST_CLIPPED,
        f"would leave an effective sample size of {_said(effect.ess)}": (effect.ess or 0) < LEAST_ESS,
        f"would keep {_percent(effect.kept_positive)} of the positive but "
        f"{_percent(effect.kept_negative)} of the negative advantages": _one_sided(effect) > MOST_ONE_SIDED,
        f"would scale the gradient by {_said(effect.gradient_scale)}": not (
            LEAST_SCALE <= _or_1(effect.gradient_scale) <= MOST_SCALE
        ),
    }
    return next((text for text, holds in complaints.items() if holds), "")


def _gain(effect: Effect) -> str:
    kept, clipped = effect.kept_sequences / max(effect.sequences, 1), effect.clipped_tokens / effect.tokens
    scale = "" if effect.gradient_scale is None else f", gradient scale {_said(effect.gradient_scale)}"
    return (
        f"it would have kept {kept:.1%} of the sequences, clipped {clipped:.2%} of the weights{scale}, "
        f"with an effective sample size of {_said(effect.ess)}"
    )


def _one_sided(effect: Effect) -> float:
    return abs(_or_1(effect.kept_positive) - _or_1(effect.kept_negative))


def _or_1(value: float | None) -> float:
    return 1.0 if value is None else value


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"


def _said(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"

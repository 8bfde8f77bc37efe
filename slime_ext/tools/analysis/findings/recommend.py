"""Which correction to train with: what runs of ours measured under the condition of this run (evidence.yaml),
each candidate checked against what it would have done to it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slime_ext import presets
from slime_ext.config.files import read_yaml
from slime_ext.config.load import read_config
from slime_ext.core.metrics.names import HEALTHY
from slime_ext.host.contract import INIT_FLAG
from slime_ext.tools.analysis.document import (
    UNCORRECTED,
    Candidate,
    Effect,
    Finding,
    Numbers,
    Recommendation,
)
from slime_ext.tools.analysis.evidence import Condition, Mismatch, evidence
from slime_ext.tools.analysis.texts import counted
from slime_ext.tools.wording import flags_of

LONG = 1000  # response tokens from which single bad tokens decide a sequence
LAG = 4.0  # weight versions from which the lag is the reason for a correction
FEW = 100  # sequences below which a single one moves the shares that decide by more than 1%
HARMLESS = 0.98  # effective sample size of whole sequences above which nothing needs correcting,
AROUND_1 = 0.1  # as long as their mean ratio is this close to 1
# What a correction may cost.
LEAST_KEPT, LEAST_ESS, MOST_CLIPPED, MOST_ONE_SIDED = 0.9, 0.5, 0.2, 0.1
LEAST_SCALE, MOST_SCALE = 0.67, 1.5
STALE = "stale_weights"  # the finding that says that the sampler's weights lag
UNKNOWN = "unexplained"  # the finding that says no more than that something is wrong
LAG_OF_ONE = 1.5  # weight versions
LEAST_HARM = HEALTHY["k3_kl"][1] or 0.0  # nats of k3, up to which a lag needs nothing
OWN = "no preset that fits costs little, your own file does"
KINDS: Mapping[Mismatch, str] = {"lag": "from older weights", "formats": "without a known lag"}
FIRST: Mapping[Mismatch, str] = {
    "lag": "push weights more often or lower the learning rate first",
    "formats": "sample in a wider number format first",
}
LAST_RESORT: Mapping[Mismatch, tuple[str, ...]] = {
    "lag": ("token_tis", "fireworks_token", "icepop"),
    "formats": (),  # no panel supports one; under INT4 token_tis and icepop did harm
}
CENTERING = "score centering"  # the remedy that reads the sampler's likeliest tokens


def recommend(
    effects: Sequence[Effect],
    total: Numbers,
    findings: Sequence[Finding] = (),
    files: Mapping[str, str] | None = None,
    *,
    k3: float | None = None,
    steps: int | None = None,
) -> Recommendation:
    """Recommends a preset that did better than no correction in runs like this one, if it costs little here.

    Args:
        effects: of all presets, and of what ``--config`` names.
        total: the run's numbers.
        findings: errors among them are faults that no correction fixes.
        files: name -> file of --custom-config-path, of effects that are no presets; tried after all presets.
        k3: the run's median over rollouts, as in evidence.yaml; by default the mean over its tokens.
        steps: optimizer steps per rollout, None for unknown.
    """
    found = {f.name for f in findings}
    if none := _none(total, findings, found):
        return none
    mismatch: Mismatch = "lag" if STALE in found or (total.staleness or 0) >= 1 else "formats"
    distance = total.k3 if k3 is None else k3
    is_meant = not any(f.is_fault for f in findings) and (total.staleness or 1) <= LAG_OF_ONE
    if mismatch == "lag" and is_meant and (distance or 0) <= LEAST_HARM:
        return _nothing(f"a healthy lag of one: k3 {_said(distance)} needs nothing", is_made=True)
    at = Situation(mismatch, distance, steps)
    return _judged(effects, total, found, files or {}, at)


@dataclass(frozen=True)
class Situation:
    """What decides which runs of ours speak of a run."""

    mismatch: Mismatch
    k3: float | None
    steps: int | None

    @property
    def condition(self) -> Condition | None:
        """The condition of evidence.yaml that it is in; None if nothing was measured there."""
        return evidence().at(self.mismatch, self.k3, self.steps)

    def __str__(self) -> str:
        steps = f", {counted(self.steps, 'optimizer step')} per rollout" if self.steps else ""
        return f"k3 {_said(self.k3)} {KINDS[self.mismatch]}{steps}"


def _none(total: Numbers, findings: Sequence[Finding], found: set[str]) -> Recommendation | None:
    """Why no correction is looked for, or None."""
    faults = [f for f in findings if f.severity == "error"]
    if faults:
        return _nothing(
            *(f"fix {f.name} first; a correction would only hide it. {_sentence(f.fix)}" for f in faults),
            "then analyse again",
            launch="",
        )
    if UNKNOWN in found:
        return _nothing(
            f"k3 {_said(total.k3)} of unknown cause: a correction might hide a fault, and whether it would "
            "help cannot be told",
            "find the cause first (the finding says where to look), and analyse again",
        )
    if unclear := [f for f in findings if f.is_fault and (f.or_else or f.says == "symptom")]:
        return _nothing(
            *(f"{' or '.join((f.name, *f.or_else))}: the dump cannot tell which" for f in unclear),
            "decide that first: what to switch on or to try is said there; one of these may be a fault",
        )
    if total.tokens == total.nonfinite:
        return _nothing("no response token has a finite log-prob of both policies: nothing can be compared")
    if total.sequences < FEW:
        return _nothing(
            f"too few sequences ({total.sequences}) to recommend anything; use at least {FEW}: one "
            "of fewer moves the shares that decide by more than 1%",
        )
    return None


def _judged(
    effects: Sequence[Effect], total: Numbers, found: set[str], files: Mapping[str, str], at: Situation
) -> Recommendation:
    if _is_harmless(total):
        return _nothing(
            f"effective sample size of whole sequences {_said(total.ess_sequence)}, k3 {_said(total.k3)}: "
            "the policies are so close that no correction would change the gradient noticeably",
            is_made=True,
        )
    condition, by_name = at.condition, {effect.name: effect for effect in effects}
    considered: list[Candidate] = []
    chosen, why = None, ("", "")
    for name, reason in _candidates(total, found, files, at).items():
        if name not in by_name:
            continue
        complaint = cost(by_name[name]) or _harm(name, condition)
        considered.append(Candidate(name=name, chosen=not complaint, reason=complaint or "costs little"))
        if not complaint:
            chosen, why = name, (reason, _gain(by_name[name]))
            break
    reasons = _measured(at, condition) if condition else _unmeasured(at)
    if condition and (centering := _centering(condition, total)):
        reasons = (*reasons, centering)
    remedy = condition.of(chosen) if condition and chosen else None
    if chosen and remedy and remedy.helped:
        return Recommendation(
            name=chosen, reasons=(*reasons, *why), flags=flags(chosen), candidates=tuple(considered)
        )
    return _nothing(*reasons, *_next(at, chosen, why), is_made=True, candidates=considered)


def _next(at: Situation, chosen: str | None, why: tuple[str, str]) -> tuple[str, ...]:
    """What to do where no preset was shown to help."""
    if at.condition and at.condition.scored:
        return ()  # whether to correct at all depends on what is served
    if chosen is None and not LAST_RESORT[at.mismatch]:
        return FIRST[at.mismatch], "no run of ours supports a correction of this mismatch"
    if chosen is None:
        return FIRST[at.mismatch], "every candidate costs too much here; analyse again when k3 is smaller"
    reason, gain = why
    trial = f"to find out, train the same seeds with and without {chosen}: {reason}"
    return FIRST[at.mismatch], trial, gain


def _measured(at: Situation, condition: Condition) -> tuple[str, ...]:
    """What our runs say of a run that is like them."""
    remedies = ", ".join(map(str, condition.remedies))
    said = [
        f"{at}: our runs had {condition.range} ({', '.join(condition.panels)}: {condition.what}; "
        f"{counted(condition.steps_per_rollout, 'optimizer step')} per rollout)",
        f"held-out score at the end, less that of uncorrected runs: {remedies}",
    ]
    if condition.scored:
        said.append(
            f"they were scored with {condition.scored}: if you serve such weights, train uncorrected; if you "
            "serve the trainer's own, this does not tell you: evaluate both, or sample in a wider format"
        )
    return tuple(said)


def _centering(condition: Condition, total: Numbers) -> str:
    """What score centering gained there, and what it needs; empty where it was not run or did not gain."""
    remedy = next((r for r in condition.remedies if r.remedy == CENTERING), None)
    if remedy is None or remedy.effect <= 0:
        return ""
    needs = (
        "the sampler's likeliest tokens are in the dump"
        if total.kl is not None
        else "record the sampler's likeliest tokens first (slime_ext.host.generate, docs/slime.md)"
    )
    return (
        f"a candidate is {remedy}, the preset score_centering: {needs}; --presets score_centering computes "
        "what it would add to the loss"
    )


def _unmeasured(at: Situation) -> tuple[str, ...]:
    """What to say of a run unlike ours."""
    measured = list(evidence().measured(at.mismatch))
    steps = " or ".join(counted(n, "optimizer step") for n in sorted({c.steps_per_rollout for c in measured}))
    ours = f"{' and '.join(c.range for c in measured)}, {steps} per rollout"
    return (
        f"{at}: no run of ours was there, so whether a correction helps is not known "
        f"(we measured k3 {ours}; docs/evidence.md)",
    )


def _harm(name: str, condition: Condition | None) -> str:
    """What a preset did to runs of ours like this one, if it did harm."""
    remedy = condition.of(name) if condition else None
    return f"did harm in our runs: {remedy}" if remedy and remedy.did_harm else ""


def _sentence(text: str) -> str:
    """The first sentence of a text."""
    return f"{text.split('. ')[0].rstrip('.')}."


def flags(name: str, file: str | None = None) -> str:
    """The flags to add to slime's launch command for a preset or a file."""
    if file is not None:
        return " ".join([f"--custom-config-path {file}", *_lacking(file)])
    return flags_of(name, presets.get(name))


def _lacking(file: str) -> list[str]:
    given = read_yaml(file)
    wanted = flags_of("correct", read_config(given["slime_ext"]).correction)
    return [
        flag
        for flag in re.findall(r"--\S+(?: [^-]\S*)?", wanted)
        if flag.split()[0].removeprefix("--").replace("-", "_") not in given
    ]


def _nothing(
    *reasons: str, is_made: bool = False, candidates: Sequence[Candidate] = (), launch: str = INIT_FLAG
) -> Recommendation:
    """No correction; ``launch`` has the flags with which a run measures on, none before a fault is fixed."""
    return Recommendation(
        name=UNCORRECTED,
        reasons=reasons,
        flags=launch,
        candidates=tuple(candidates),
        is_made=is_made,
    )


def _is_harmless(total: Numbers) -> bool:
    """Whether the policies are so close that nothing needs correcting. Equal weights alone do not show it:
    they are equal too where all ratios are far from 1, or with one sequence."""
    if total.ess_sequence is None or total.chi2_sequence is None or total.ess_sequence < HARMLESS:
        return False
    mean = math.sqrt(total.ess_sequence * (1 + total.chi2_sequence))
    return abs(mean - 1) <= AROUND_1


def _candidates(total: Numbers, found: set[str], files: Iterable[str], at: Situation) -> dict[str, str]:
    """Name -> why, in the order in which they are tried: what helped in runs of ours, then what fits."""
    mismatch, condition = at.mismatch, at.condition
    remedies = condition.remedies if condition else ()
    tried = {r.preset: "it helped in our runs" for r in remedies if r.preset and r.helped}
    if (total.staleness or 0) >= LAG:
        lag = f"the weights lag {_said(total.staleness)} versions"
        why = f"{lag}: one capped weight per token, beside the host's clip"
        tried.setdefault("token_tis", why)
    if (total.response_length or 0) >= LONG:
        length = f"responses of {total.response_length:,.0f} tokens"
        tried["skyrl_geo_mask"] = f"{length}: sequences that drifted are dropped"
    last = "without long responses or a long lag one capped weight per token is enough"
    if STALE in found:
        last = "for older weights one capped weight per token, beside the host's clip"
    if tried:
        last = "what fits the situation costs too much; this is the next that costs little"
    presets_left = {name: last for name in LAST_RESORT[mismatch] if name not in tried}
    return tried | presets_left | dict.fromkeys(files, OWN)


def cost(effect: Effect) -> str:
    """Why a correction costs too much; empty if it does not."""
    if effect.unavailable:
        return effect.unavailable
    kept = effect.kept_sequences / max(effect.sequences, 1)
    clipped = effect.clipped_tokens / effect.tokens
    complaints = {
        f"would reject {1 - kept:.0%} of the sequences": kept < LEAST_KEPT,
        f"would clip {clipped:.0%} of the weights": clipped > MOST_CLIPPED,
        f"effective sample size {_said(effect.ess)}": (effect.ess or 0) < LEAST_ESS,
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

"""Which correction to train with: the decision tree of docs/corrections.md, each candidate checked against
what it would have done to this run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from slime_ext import presets
from slime_ext.config.files import read_yaml
from slime_ext.config.load import read_config
from slime_ext.tools.analysis.document import Candidate, Effect, Finding, Numbers, Recommendation
from slime_ext.tools.wording import flags_of

LONG = 1000  # response tokens from which single bad tokens decide a sequence
LAG = 4.0  # weight versions from which the lag is the reason for a correction
FEW = 100  # sequences below which a single one moves the shares that decide by more than 1%
HARMLESS = 0.98  # effective sample size of whole sequences above which nothing needs correcting,
AROUND_1 = 0.1  # as long as their mean ratio is this close to 1
# What a correction may cost.
LEAST_KEPT, LEAST_ESS, MOST_CLIPPED, MOST_ONE_SIDED = 0.9, 0.5, 0.2, 0.1
LEAST_SCALE, MOST_SCALE = 0.67, 1.5
FAR = 0.3  # k3 in nats from which no preset has been shown to help (lm_lag_again, lm_int4: docs/evidence.md)
OF_OLD = (
    "push weights more often first: token_tis did not reliably undo such a lag; score centering (center) did "
    "on 16 seeds"
)
OF_FRESH = (
    "the policies are so far apart without a known lag that a correction can do more harm than the mismatch: "
    "under INT4 weights token_tis and icepop ended below the uncorrected runs (docs/evidence.md)"
)
CLOSER = "sample in a wider number format first; then analyse again"
STALE = "stale_weights"  # the finding that says that the sampler's weights lag
SPIKES = frozenset({"routing_flips"})  # findings of few tokens that are far off
UNKNOWN = "unexplained"  # the finding that says no more than that something is wrong
OWN = "no preset that fits costs little, your own file does"
UNCORRECTED = "metrics_only"
LAST_RESORT = ("token_tis", "fireworks_token", "icepop", "cispo")


def recommend(
    effects: Sequence[Effect],
    total: Numbers,
    findings: Sequence[Finding] = (),
    files: Mapping[str, str] | None = None,
) -> Recommendation:
    """Recommends the first candidate that does not cost too much.

    Args:
        effects: of all presets, and of what ``--config`` names.
        total: the run's numbers.
        findings: errors among them are faults that no correction mends.
        files: name -> file of --custom-config-path, of effects that are no presets; tried after all presets.
    """
    found = {f.name for f in findings}
    if none := _none(total, findings, found):
        return none
    made = _judged(effects, total, found, files or {})
    caveats = [
        f"{' or '.join((f.name, *f.or_else))}: the dump cannot tell which; a fault is mended first"
        for f in findings
        if f.or_else
    ]
    if made.name != UNCORRECTED and (total.k3 or 0) >= FAR:
        caveats.append(f"{OF_OLD} (k3 is {_said(total.k3)} nats; docs/evidence.md)")
    return made.model_copy(update={"reasons": (*made.reasons, *caveats)})


def _none(total: Numbers, findings: Sequence[Finding], found: set[str]) -> Recommendation | None:
    """Why no correction is looked for, or None."""
    faults = [f for f in findings if f.severity == "error"]
    if faults:
        return _nothing(
            *(
                f"to mend first, since a correction would only hide it: {f.name}. {_sentence(f.fix)}"
                for f in faults
            ),
            "then analyse again",
        )
    if UNKNOWN in found:
        return _nothing(
            f"k3 {_said(total.k3)} of unknown cause: a correction might hide a fault, and whether it would "
            "help cannot be told",
            "find the cause first (the finding says where to look), and analyse again",
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
    effects: Sequence[Effect], total: Numbers, found: set[str], files: Mapping[str, str]
) -> Recommendation:
    if _is_harmless(total):
        return _nothing(
            f"effective sample size of whole sequences {_said(total.ess_sequence)}, k3 {_said(total.k3)}: "
            "the policies are so close that no correction would change the gradient noticeably",
            is_made=True,
        )
    if (total.k3 or 0) >= FAR and STALE not in found and (total.staleness or 0) < 1:
        return _nothing(f"k3 {_said(total.k3)}: {OF_FRESH}", CLOSER, is_made=True)
    by_name, considered = {effect.name: effect for effect in effects}, []
    for name, why in _candidates(total, found, files).items():
        if name not in by_name:
            continue
        complaint = cost(by_name[name])
        considered.append(Candidate(name=name, chosen=not complaint, reason=complaint or "costs little"))
        if not complaint:
            return Recommendation(
                name=name,
                reasons=(why, _gain(by_name[name])),
                flags=flags(name, files.get(name)),
                candidates=tuple(considered),
            )
    return _nothing(
        f"every candidate costs too much: with k3 {_said(total.k3)} and an effective sample size of tokens "
        f"{_said(total.ess_token)} the policies are too far apart for a correction",
        "bring them closer: push weights more often, sample in a wider dtype, fewer optimizer steps per "
        "rollout; then analyse again",
        is_made=True,
        candidates=considered,
    )


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


def _nothing(*reasons: str, is_made: bool = False, candidates: Sequence[Candidate] = ()) -> Recommendation:
    return Recommendation(
        name=UNCORRECTED,
        reasons=reasons,
        flags=flags(UNCORRECTED),
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


def _candidates(total: Numbers, found: set[str], files: Iterable[str]) -> dict[str, str]:
    tried: dict[str, str] = {}
    if spikes := found & SPIKES:
        why = f"{', '.join(sorted(spikes))}: few tokens are far off, which a band drops one by one"
        tried |= dict.fromkeys(("icepop", "kpop"), why)
    if (total.staleness or 0) >= LAG:
        why = (
            f"the weights lag {_said(total.staleness)} versions: a capped weight per token beside the "
            "host's clip (cispo, without that clip, lost what it had learned in our runs)"
        )
        tried |= dict.fromkeys(("token_tis", "cispo"), why)
    if (total.response_length or 0) >= LONG:
        why = f"responses of {total.response_length:,.0f} tokens: sequences that drifted go"
        tried["decoupled_geo_rs_token_tis"] = f"{why}, the rest is weighted token by token"
        tried["skyrl_geo_mask"] = why
    last = "neither long responses nor a long lag: one capped weight per token is enough"
    if STALE in found:
        last = f"older weights ({STALE}): one capped weight per token beside the host's clip"
    if tried:
        last = "what fits the situation costs too much: the next that costs little"
    presets_left = {name: last for name in LAST_RESORT if name not in tried}
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

"""Recommends a correction to train with.

A candidate is recommended if it helped in our runs under the condition of this run (evidence.yaml), and if it
would have cost this run little.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slime_ext import presets
from slime_ext.config.files import read_yaml
from slime_ext.config.load import read_config
from slime_ext.core.metrics.names import HEALTHY
from slime_ext.hosts.contract import INIT_FLAG
from slime_ext.tools.analysis.document import (
    UNCORRECTED,
    Candidate,
    Effect,
    Finding,
    Numbers,
    Recommendation,
)
from slime_ext.tools.analysis.evidence import Condition, Mismatch, Remedy, evidence
from slime_ext.tools.analysis.texts import counted
from slime_ext.tools.wording import flags_of

LONG = 1000  # response tokens from which a few bad tokens decide the weight of a sequence
LAG = 4.0  # weight versions from which the lag is a reason for a correction
FEW = 100  # sequences; with fewer, one sequence changes the shares below by more than 1%
# Limits of what a correction may cost.
LEAST_KEPT, LEAST_ESS, MOST_CLIPPED, MOST_ONE_SIDED = 0.9, 0.5, 0.2, 0.1
LEAST_SCALE, MOST_SCALE = 0.67, 1.5
STALE = "stale_weights"  # the finding that the sampler's weights lag
UNKNOWN = "unexplained"  # the finding that something is wrong, without a cause
LAG_OF_ONE = 1.5  # weight versions, which a healthy lag of one stays below
LEAST_HARM = HEALTHY["k3_kl"][1] or 0.0  # nats of k3 up to which no correction is needed
OWN = "every preset that fits costs too much, but your file costs little"
KINDS: Mapping[Mismatch, str] = {"lag": "from older weights", "formats": "without a known lag"}
FIRST: Mapping[Mismatch, str] = {
    "lag": "push weights more often or lower the learning rate first",
    "formats": "sample in a wider number format first",
}
UNBOUNDED = "importance_sampling"  # has neither cap nor clip
CAPS = "it caps one weight per token, beside the host's clip"
LAST_RESORT: Mapping[
    Mismatch, Mapping[str, str]
] = {  # preset -> reason, in the order in which they are tried
    "lag": {
        "token_tis": CAPS,
        UNBOUNDED: "it weights each token by its whole ratio",
        "icepop": "it drops the tokens whose ratio is outside a band",
    },
    "formats": {"token_tis": CAPS},  # no panel supports a preset; icepop did harm under INT4
}
TRAINERS = "the trainer's weights"
COMPARE: Mapping[Mismatch, str] = {
    "lag": "evaluate a run with and one without a correction, or push weights more often",
    "formats": "evaluate a run with and one without a correction, or sample in a wider number format",
}
STEPS = "how many optimizer steps a rollout has (num_steps_per_rollout)"
PUSHES = "after how many rollouts weights are pushed (update_weights_interval)"
CENTERING = "score centering"  # the remedy that reads log-probs of the sampler's likeliest tokens


def recommend(
    effects: Sequence[Effect],
    total: Numbers,
    findings: Sequence[Finding] = (),
    files: Mapping[str, str] | None = None,
    *,
    k3: float | None = None,
    steps: int | None = None,
    rollouts_per_push: int | None = None,
) -> Recommendation:
    """Recommends a preset that helped in our runs like this one, if it costs little here.

    Args:
        effects: of the evaluated presets, and of the files of ``--config``.
        total: the run's numbers.
        findings: of the run; no correction is recommended before errors are fixed.
        files: name -> file of ``--config``; these corrections are tried after the presets.
        k3: the run's median over rollouts, as in evidence.yaml; default: the mean over tokens.
        steps: optimizer steps per rollout; None: unknown.
        rollouts_per_push: rollouts from one push of weights to the next; None: unknown.
    """
    names = {f.name for f in findings}
    if no_correction := _none(total, findings, names):
        return no_correction
    # train.py pushes after every rollout whatever the flag says; then every age is 0.
    skips_pushes = (rollouts_per_push or 1) > 1 and total.staleness != 0
    is_lagging = STALE in names or (total.staleness or 0) >= 1 or skips_pushes
    mismatch: Mismatch = "lag" if is_lagging else "formats"
    distance = total.k3 if k3 is None else k3
    is_lag_of_one = not skips_pushes and (total.staleness or 1) < LAG_OF_ONE
    is_meant = is_lag_of_one and not any(f.is_fault for f in findings)
    is_healthy = max(distance or 0, total.k3 or 0) <= LEAST_HARM
    at = Situation(mismatch, distance, steps, rollouts_per_push if is_lagging else None)
    if is_healthy and (is_meant or mismatch == "formats"):
        whose = "a healthy lag of one: " if mismatch == "lag" else ""
        needs = f"k3 {_said(distance)} needs no correction, because it is at most {LEAST_HARM:g}"
        return _nothing(whose + needs, *(_measured(at) if at.condition else ()), is_made=True)
    return _judged(effects, total, files or {}, at)


@dataclass(frozen=True)
class Situation:
    """The properties of a run that decide which of our runs are like it."""

    mismatch: Mismatch
    k3: float | None
    steps: int | None
    rollouts_per_push: int | None

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions of evidence.yaml that the run meets; none if we measured nothing like it."""
        return evidence().at(self.mismatch, self.k3, self.steps, self.rollouts_per_push)

    @property
    def condition(self) -> Condition | None:
        """The first of ``conditions``."""
        return next(iter(self.conditions), None)

    @property
    def is_open(self) -> bool:
        """Whether something that the run does not tell decides which of our runs are like it."""
        return len({(c.steps_per_rollout, c.rollouts_per_push) for c in self.conditions}) > 1

    @property
    def untold(self) -> Iterator[str]:
        """What the run does not tell, with what our runs like it have."""
        if self.steps is None:
            yield _untold(STEPS, map(_steps, self.conditions))
        if self.rollouts_per_push is None and self.mismatch == "lag":
            yield _untold(PUSHES, map(_push, self.conditions))

    def __str__(self) -> str:
        steps = f", {counted(self.steps, 'optimizer step')} per rollout" if self.steps else ""
        pushed = f", weights {_every(self.rollouts_per_push)}" if self.rollouts_per_push else ""
        return f"k3 {_said(self.k3)} {KINDS[self.mismatch]}{steps}{pushed}"


def _none(total: Numbers, findings: Sequence[Finding], names: set[str]) -> Recommendation | None:
    """Returns a recommendation without a correction, if findings or missing data require it."""
    faults = [f for f in findings if f.severity == "error"]
    if faults:
        return _nothing(
            *(f"fix {f.name} first, because a correction would only hide it" for f in faults),
            "then analyse again",
            launch="",
        )
    if UNKNOWN in names:
        return _nothing(
            f"k3 {_said(total.k3)} has an unknown cause, so a correction might hide a fault, and nobody "
            "knows whether it would help",
            "find the cause first, as the finding says, then analyse again",
        )
    if unclear := [f for f in findings if f.is_fault and (f.or_else or f.says == "symptom")]:
        return _nothing(
            *(f"{' or '.join((f.name, *f.or_else))}: the dump cannot tell which" for f in unclear),
            "find out first, as the finding says, because one of these may be a fault",
        )
    if total.tokens == total.nonfinite:
        return _nothing("no response token has finite log-probs of both policies, so nothing can be compared")
    if total.sequences < FEW:
        return _nothing(
            f"too few sequences ({total.sequences}) to recommend anything: analyse at least {FEW}, because "
            "with fewer a single sequence changes the shares by more than 1%",
        )
    return None


def _judged(
    effects: Sequence[Effect], total: Numbers, files: Mapping[str, str], at: Situation
) -> Recommendation:
    condition, by_name = at.condition, {effect.name: effect for effect in effects}
    considered: list[Candidate] = []
    chosen, why = None, ("", "")
    for name, reason in _candidates(total, files, at).items():
        if name not in by_name:
            continue
        complaint = cost(by_name[name]) or _harm(name, at.conditions)
        considered.append(Candidate(name=name, chosen=not complaint, reason=complaint or "costs little"))
        if not complaint:
            chosen, why = name, (reason, _gain(by_name[name]))
            break
    reasons = tuple(_measured(at)) if condition else _unmeasured(at)
    if condition and not at.is_open:
        reasons = (*reasons, *_others(condition, total, by_name))
    remedy = condition.of(chosen) if condition and chosen else None
    # Nothing is recommended where the served policy, or what the dump does not tell, decides.
    if condition and not (condition.scored or at.is_open) and chosen and remedy and remedy.helped:
        reasons = (*reasons, *_better(condition, remedy), *why)
        return Recommendation(name=chosen, reasons=reasons, flags=flags(chosen), candidates=tuple(considered))
    return _nothing(*reasons, *_next(at, considered, chosen, why), is_made=True, candidates=considered)


def _next(
    at: Situation, considered: Sequence[Candidate], chosen: str | None, why: tuple[str, str]
) -> tuple[str, ...]:
    """Returns what to do if no preset helped in runs like this one."""
    if at.is_open:
        return ()  # `_measured` says what to do in each case
    if not considered:
        return FIRST[at.mismatch], "no candidate was evaluated: leave out --presets"
    reason, gain = why
    trial = f"train the same seeds with and without {chosen}: {reason}"
    if at.condition and at.condition.scored:
        unlike = "if your sampler's weights are not rounded, these runs do not tell"
        return (f"{unlike}: {trial}", gain) if chosen else (f"{unlike}: {FIRST[at.mismatch]}",)
    if chosen is None:
        return FIRST[at.mismatch], "every candidate costs too much here, so analyse again when k3 is smaller"
    return FIRST[at.mismatch], f"to find out, {trial}", gain


def _measured(at: Situation) -> Iterator[str]:
    """Yields what our runs measured, for a run that is like them."""
    yield f"{at}: our runs like it had {' and '.join(dict.fromkeys(map(_runs, at.conditions)))}"
    for condition in at.conditions:
        remedies = ", ".join(map(str, condition.remedies))
        which = f"{_which(condition)}, " if at.is_open else ""
        scores = f"their held-out scores at the end, minus those of uncorrected runs{condition.whose}"
        yield f"{which}{scores}: {remedies}"
    served = dict.fromkeys(condition.scored for condition in at.conditions if condition.scored)
    for weights in served:
        train = _how_to_train([c for c in at.conditions if c.scored == weights])
        yield f"if your sampler's weights are rounded like theirs and you serve {weights}, {train}"
    if served and TRAINERS not in served:
        yield f"if you serve {TRAINERS}, these runs do not tell: {COMPARE[at.mismatch]}"
    yield from at.untold
    if at.is_open:
        for condition in at.conditions:
            yield f"{_which(condition)}, {_how_to_train([condition])}"


def _untold(what: str, ours: Iterable[str]) -> str:
    """Says that the dump does not tell something, which our runs have in one way or in several."""
    return f"the dump does not tell {what}; these runs have {' or '.join(sorted(set(ours)))}"


def _runs(condition: Condition) -> str:
    where = f"{', '.join(condition.panels)}: {condition.what}; {_steps(condition)} per rollout"
    return f"k3 {condition.range} ({where})"


def _which(condition: Condition) -> str:
    return f"with {_steps(condition)} per rollout and {_push(condition)}"


def _steps(condition: Condition) -> str:
    return counted(condition.steps_per_rollout, "optimizer step")


def _push(condition: Condition) -> str:
    return f"weights {_every(condition.rollouts_per_push)}"


def _every(rollouts: int) -> str:
    return "pushed after every rollout" if rollouts == 1 else f"pushed every {rollouts} rollouts"


def _how_to_train(conditions: Sequence[Condition]) -> str:
    """Says how to train, by what gained and what did harm in the runs of the conditions."""
    remedies = [remedy for condition in conditions for remedy in condition.remedies if remedy.preset]
    gained = dict.fromkeys(remedy.remedy for remedy in remedies if remedy.helped)
    lost = dict.fromkeys(remedy.remedy for remedy in remedies if remedy.did_harm)
    mixed = [name for name in gained if name in lost]
    better, worse = ([name for name in of if name not in mixed] for of in (gained, lost))
    if not (gained or lost):
        return f"no correction is shown to gain or to harm: {COMPARE[conditions[0].mismatch]}"
    parts = [f"try {' or '.join(better)}, which gained there" if better else "train uncorrected"]
    parts += [f"{' and '.join(worse)} did harm there"] * bool(worse)
    parts += [f"{name} gained in one panel and did harm in another" for name in mixed]
    return "; ".join(parts)


def _better(condition: Condition, chosen: Remedy) -> Iterator[str]:
    """Yields what helped more than the chosen preset and is no preset, such as another learning rate."""
    better = [r for r in condition.remedies if r.preset is None and r.helped and r.effect > chosen.effect]
    if better:
        yield f"these gained more, so try what you can of them first: {', '.join(map(str, better))}"


def _others(condition: Condition, total: Numbers, tried: Container[str]) -> Iterator[str]:
    """Yields what helped in our runs beside the evaluated presets, and what it needs."""
    for remedy in condition.remedies:
        if remedy.preset is None or remedy.preset in tried or not remedy.helped:
            continue
        needs = ""
        if remedy.remedy == CENTERING and total.kl is None:
            needs = "record the sampler's likeliest tokens first (slime_ext.host.generate, docs/slime.md); "
        yield (
            f"a candidate is {remedy}, the preset {remedy.preset}: {needs}type --presets {remedy.preset} "
            "--out report.html to see how it would change the gradient"
        )


def _unmeasured(at: Situation) -> tuple[str, ...]:
    """Returns the reason for a run that is unlike our runs."""
    measured = sorted(evidence().measured(at.mismatch), key=lambda condition: condition.k3)
    ranges = ", ".join(dict.fromkeys(condition.range for condition in measured))
    steps = " or ".join(counted(n, "optimizer step") for n in sorted({c.steps_per_rollout for c in measured}))
    return (
        f"{at}: none of our runs is like this, so nobody knows whether a correction helps "
        f"(we measured k3 {ranges}; {steps} per rollout; docs/evidence.md)",
    )


def _harm(name: str, conditions: Iterable[Condition]) -> str:
    """Returns the harm that a preset did in our runs like this one; empty if none."""
    remedies = (remedy for condition in conditions if (remedy := condition.of(name)) is not None)
    return next((f"did harm in our runs: {remedy}" for remedy in remedies if remedy.did_harm), "")


def flags(name: str, file: str | None = None) -> str:
    """Returns the flags to add to slime's launch command for a preset or a file."""
    if file is not None:
        return " ".join([f"--custom-config-path {file}", *_lacking(file)])
    return flags_of(name, presets.get(name))


def _lacking(file: str) -> list[str]:
    config = read_yaml(file)
    wanted = flags_of("correct", read_config(config["slime_ext"]).correction)
    return [
        flag
        for flag in re.findall(r"--\S+(?: [^-]\S*)?", wanted)
        if flag.split()[0].removeprefix("--").replace("-", "_") not in config
    ]


def _nothing(
    *reasons: str, is_made: bool = False, candidates: Sequence[Candidate] = (), launch: str = INIT_FLAG
) -> Recommendation:
    """Returns a recommendation without a correction. The flags of ``launch`` only measure."""
    return Recommendation(
        name=UNCORRECTED,
        reasons=reasons,
        flags=launch,
        candidates=tuple(candidates),
        is_made=is_made,
    )


def _candidates(total: Numbers, files: Iterable[str], at: Situation) -> dict[str, str]:
    """Returns candidates with a reason each, in the order in which they are tried."""
    remedies = at.condition.remedies if at.condition else ()
    tried = {r.preset: "it helped in our runs" for r in remedies if r.preset and r.helped}
    lag = total.staleness or 0
    because = f"the weights lag {_said(lag)} versions, so " if lag >= LAG else ""
    for name, why in LAST_RESORT[at.mismatch].items():
        tried.setdefault(name, because + why)
    length = total.response_length or 0
    # UNBOUNDED lacks PPO's clip, which acts from the second step on, and a cap on the ratios of long answers.
    if ((at.steps or 1) > 1 or length >= LONG) and UNBOUNDED in tried:
        tried[UNBOUNDED] = tried.pop(UNBOUNDED)
    if length >= LONG:
        tried["skyrl_geo_mask"] = f"responses of {length:,.0f} tokens, so it drops sequences that drifted"
    return tried | dict.fromkeys(files, OWN)


def cost(effect: Effect) -> str:
    """Returns why a correction costs too much; empty if it does not."""
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

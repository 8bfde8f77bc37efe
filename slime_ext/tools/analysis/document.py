"""Defines the result of an analysis as plain data.

It is the JSON of ``--json``, and the page is drawn from it.

The page shows nothing that is not in here, so both say the same. Unless a field says otherwise, l is
log numerator - log behavior of a response token in nats, and the numerator is the proximal policy. An unknown
number is null. ``Document.model_json_schema()`` is the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

from slime_ext.tools.analysis.texts import encodable

VERSION = 1
UNCORRECTED = "metrics_only"  # the preset that only measures; recommended if no correction is
MEASURES = "keep measuring with this flag, which logs k3 and other metrics at each step and corrects nothing"
Severity = Literal["error", "warning", "note"]
FINDINGS = tuple(
    sorted(
        Path(file.name).stem
        for file in files(__package__).joinpath("detectors").iterdir()
        if file.name.endswith(".py") and not file.name.startswith("_")
    )
)  # the names of the modules, which are not imported here


def _known(name: str) -> str:
    if name not in FINDINGS:
        raise ValueError(f"expected the name of a module of detectors/, got '{name}'")
    return name


FindingName = Annotated[
    str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": list(FINDINGS)})
]
CurveName = Literal["position", "staleness", "probability", "length", "turn", "outcome"]


class FrozenModel(BaseModel):
    """A model that is frozen and refuses unknown fields. NaN and infinity become null in JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")

    @field_validator("*", mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        """Makes texts encodable, because they may name a file with bytes that are not UTF-8."""
        if isinstance(value, tuple):
            return tuple(map(cls._encodable, value))
        if isinstance(value, Skipped):
            return Skipped(encodable(value.path), encodable(value.reason))
        return encodable(value) if isinstance(value, str) else value


class Finding(FrozenModel):
    """A fault of the run, or a fact that its reader must know."""

    name: FindingName = Field(description="what --fail-on names")
    severity: Severity
    says: Literal["cause", "symptom"] = Field(
        "cause", description="symptom: several causes remain, which ``ruled_out`` and ``or_else`` name"
    )
    title: str = Field(description="one plain sentence")
    evidence: str = Field(description="the figures that show it")
    fix: str = Field(description="what to do about it")
    rollouts: tuple[int, ...] = Field((), description="ids of the rollouts that show it; empty: all of them")
    threshold: str = Field("", description="what the figures had to exceed for this finding")
    ruled_out: str = Field("", description="the next likely explanation, and the evidence against it")
    or_else: tuple[FindingName, ...] = Field(
        (), description="findings that the dump cannot tell from this one; empty: no other remains"
    )
    explains: float | None = Field(
        None,
        description="share of k3 that goes if the finding's tokens become like all others; null: unknown",
    )
    explains_error: float | None = Field(None, description="standard error of ``explains``")

    @property
    def rank(self) -> int:
        """The rank of the severity: 0 is an error, 1 a warning, 2 a note."""
        return get_args(Severity).index(self.severity)

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong; a note only says what a reader must know."""
        return self.severity != "note"


class Looked(FrozenModel):
    """The result of one detector on a run."""

    name: FindingName
    state: Literal["found", "nothing", "could not look", "left to another", "excluded"]
    detail: str = Field(
        "",
        description="the threshold, what the detector needs, the finding that it is left to, or the identity "
        "that excludes its cause, by ``state``",
    )


class Record(FrozenModel):
    """Whether tokens were drawn from the distribution whose log-probs the sampler recorded."""

    side: Literal["honest", "altered", "unknown"] = Field(
        description="honest: as far as the mean ratio tells, so no altered record makes most of k3; altered: "
        "not all of them, so old weights, precision, noise and routing do not make it; unknown: too uncertain"
    )
    mean_ratio: float | None = Field(
        None, description="mean e^l over tokens, at most 10 each, which is 1 for tokens that were drawn so"
    )
    error: float | None = Field(None, description="standard error of ``mean_ratio`` over samples")
    where: str = Field("", description="the part of the run that ``mean_ratio`` is of; empty: all of it")
    said: str = Field("", description="the same in a sentence")


class Numbers(FrozenModel):
    """Sizes, and distances between the policies, of one rollout or of a run."""

    tokens: int = Field(0, description="response tokens with mask 1")
    sequences: int = 0
    nonfinite: int = Field(
        0, description="tokens that lack a behavior log-prob, or a finite log-prob of the trainer"
    )
    mean: float | None = Field(None, description="mean l; k1 is its negative")
    absolute: float | None = Field(None, description="mean |l|")
    k3: float | None = Field(None, description="mean e^l - 1 - l, which estimates KL(behavior || proximal)")
    kl: float | None = Field(
        None,
        description="KL(behavior || proximal) over recorded heads; the tokens beyond a head count as one",
    )
    tail: float | None = Field(None, description="mean probability of the tokens beyond the recorded heads")
    chi2_token: float | None = Field(None, description="mean e^2l - 1")
    chi2_sequence: float | None = Field(
        None, description="mean e^2L - 1 over sequences, L the sum of l over a sequence"
    )
    ess_token: float | None = Field(None, description="effective sample size of e^l, in (0, 1]")
    ess_geometric: float | None = Field(None, description="the same of the sequences' geometric mean ratios")
    ess_sequence: float | None = Field(None, description="the same of the products of ratios over sequences")
    log_ratio_max: float | None = Field(None, description="largest |l|")
    differing_fraction: float | None = Field(
        None, description="share of tokens whose two log-probs differ in any bit"
    )
    ratio_p01: float | None = Field(
        None, description="1st percentile of e^l; l is rounded towards 0 by at most 0.4%"
    )
    ratio_p50: float | None = Field(None, description="median of e^l, rounded alike")
    ratio_p99: float | None = Field(None, description="99th percentile of e^l, rounded alike")
    perplexity_behavior: float | None = None
    perplexity_proximal: float | None = None
    reward: float | None = Field(None, description="mean over sequences")
    response_length: float | None = Field(None, description="mean over sequences, tokens")
    staleness: float | None = Field(None, description="mean age of the sampling weights, weight versions")
    least_staleness: float | None = Field(
        None,
        description="a lower bound of the mean rollouts trained since the sampling weights; null: no guess",
    )
    most_staleness: float | None = Field(
        None, description="an upper bound of the same; null: none is known (it needs rollout 0)"
    )


class Moment(FrozenModel):
    """The numbers of one rollout."""

    rollout_id: int
    numbers: Numbers


class Bin(FrozenModel):
    """One bar of the distribution of l: low <= l < high."""

    low: float
    high: float
    count: int


class Point(FrozenModel):
    """A point of a curve: the number of tokens around x, and their means."""

    x: float
    count: int = Field(description="tokens")
    mean: float = Field(description="mean l")
    absolute: float = Field(description="mean |l|")
    label: str | None = Field(None, description="the name of x, such as correct; null: x is shown")


class Curve(FrozenModel):
    """The log-ratio as a function of something."""

    name: CurveName
    points: tuple[Point, ...]


class Span(FrozenModel):
    """A token of a worst sample. The page colours its text by l."""

    text: str
    log_ratio: float | None = Field(
        None, description="null: the token is of a prompt or tool, or l is not finite"
    )


class Worst(FrozenModel):
    """A sample or a token with a large log-ratio."""

    kind: Literal["sequence", "token"]
    rollout_id: int
    position: int = Field(description="of the sample in the rollout's dump")
    token: int | None = Field(None, description="position in the response; null for a sequence")
    log_ratio: float = Field(description="l of the token, or the sum of l over the sequence")
    tokens: int = Field(description="response tokens of the sample")
    reward: float | None = None
    text: str = Field("", description="the response, or the text around the token")
    spans: tuple[Span, ...] = ()


class Effect(FrozenModel):
    """The effect that a correction would have had on the rollouts."""

    name: str
    formula: str = ""
    source: str = ""
    numerator: Literal["proximal", "target"] = "proximal"
    unavailable: str | None = Field(None, description="why there are no numbers")
    tokens: int = Field(0, description="response tokens that the correction saw")
    kept_tokens: int = 0
    sequences: int = Field(0, description="sequences with a response token")
    kept_sequences: int = Field(0, description="sequences of which a token is kept")
    clipped_tokens: int = Field(0, description="tokens whose weight or ratio was clipped")
    weight_mean: float | None = Field(None, description="mean weight of kept tokens")
    weight_quantiles: dict[str, float] = Field(
        default_factory=dict, description="of kept tokens, exact up to 0.4%; keys: min p01 p50 p99 max"
    )
    ess: float | None = Field(None, description="(sum w)^2 / (n sum w^2); rejected tokens have weight 0")
    kept_positive: float | None = Field(None, description="share of sum A over A > 0 that is kept")
    kept_negative: float | None = Field(None, description="share of sum |A| over A < 0 that is kept")
    gradient_scale: float | None = Field(
        None,
        description="sum |d loss / d log target| / sum |A| at target = proximal; 1: as without a correction",
    )
    centering: float | None = Field(
        None, description="sum |A C| / sum |A|, nats: how much center adds to the loss; null without center"
    )
    rejected: dict[str, str] = Field(
        default_factory=dict,
        description="rollout id -> positions of sequences without a kept token, such as 0-3,7",
    )


class Candidate(FrozenModel):
    """A correction that was considered, and the reason why it was chosen or not."""

    name: str
    chosen: bool = Field(description="true: train with it, or try it beside an uncorrected run")
    reason: str


class Recommendation(FrozenModel):
    """The row of the decision table that applies to a run (``tools/decision.py``)."""

    name: str = Field(description="the correction to compare with uncorrected runs, or metrics_only")
    reasons: tuple[str, ...] = Field(description="the row and why it applies, what to do, and what it costs")
    flags: str = Field(description="what to add to the launch command; empty before a fault is fixed")
    candidates: tuple[Candidate, ...] = ()
    is_made: bool = Field(
        True, description="false: fix a fault first, or record more data; ``name`` is then metrics_only"
    )


class Suggestion(FrozenModel):
    """The thresholds at which a rejection drops at most the requested share of its units."""

    name: str
    unit: Literal["token", "sequence"]
    wished: float
    reached: float = Field(
        description="the largest possible share that is not above ``wished``; ties limit it"
    )
    low: float | None = None
    high: float | None = None
    units: int = Field(description="how many tokens or sequences the run has")
    config: str = Field(description="YAML for --custom-config-path")


class FirstDifference(FrozenModel):
    """The first response token whose two log-probs differ."""

    rollout_id: int
    position: int = Field(description="of the sample in the rollout's dump")
    token: int = Field(description="position in the response")
    sampler: str = Field(description="log-prob as float.hex() writes it")
    trainer: str = Field(description="log-prob as float.hex() writes it")
    bits: int = Field(description="how many of the 32 bits differ")


class PartOfRun(FrozenModel):
    """The response tokens of one rollout, or of one range of positions."""

    label: str
    tokens: int
    differing: int


class Exact(FrozenModel):
    """The comparison of both log-probs of every response token, bit for bit (``--expect exact``)."""

    tokens: int
    differing: int = Field(description="tokens whose log-probs differ, or that lack one")
    largest: float = Field(description="largest |l|, nats")
    first: FirstDifference | None = None
    by_rollout: tuple[PartOfRun, ...] = ()
    by_position: tuple[PartOfRun, ...] = ()
    precision: str = Field("", description="which side lost digits, if the digits show it")


@dataclass(frozen=True)
class Skipped:
    """A file, or a part of a file, that was not analysed."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Document(FrozenModel):
    """Everything that the analysis found in a run."""

    version: int = VERSION
    name: str
    paths: tuple[str, ...] = ()
    made_with: str = ""
    skipped: tuple[Skipped, ...] = ()
    unread: str = Field("", description="how much of the run could not be read; empty: all of it was")
    notes: tuple[str, ...] = ()
    total: Numbers = Numbers()
    findings: tuple[Finding, ...] = ()
    detectors: tuple[Looked, ...] = ()
    record: Record | None = Field(None, description="the first split of all causes")
    distribution: tuple[Bin, ...] = ()
    curves: tuple[Curve, ...] = ()
    timeline: tuple[Moment, ...] = ()
    worst: tuple[Worst, ...] = ()
    effects: tuple[Effect, ...] = ()
    recommendation: Recommendation | None = None
    headline: str = Field("", description="what to do next, in one line")
    suggestions: tuple[Suggestion, ...] = ()
    exact: Exact | None = Field(None, description="null without --expect exact")

    @property
    def is_whole(self) -> bool:
        """Whether every file, line and sample was read."""
        return not (self.skipped or self.unread)

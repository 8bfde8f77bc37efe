"""What an analysis found, as plain data: the JSON of ``--json``, and all that the page is drawn from.

The page shows nothing that is not in here, so both tell the same. Unless said otherwise l is log numerator -
log behavior of a response token in nats, the numerator is the proximal policy, and a number that cannot be
known is null. ``Document.model_json_schema()`` is the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

VERSION = 1
UNCORRECTED = "metrics_only"  # the preset that only measures, recommended where no correction is
Severity = Literal["error", "warning", "note"]
FINDINGS = tuple(
    sorted(
        Path(file.name).stem
        for file in files(__package__).joinpath("detectors").iterdir()
        if file.name.endswith(".py") and not file.name.startswith("_")
    )
)  # by the names of their modules, none of which is imported


def _known(name: str) -> str:
    if name not in FINDINGS:
        raise ValueError(f"expected the name of a module of detectors/, got '{name}'")
    return name


FindingName = Annotated[
    str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": list(FINDINGS)})
]
CurveName = Literal["position", "staleness", "probability", "length", "turn", "outcome"]


class FrozenModel(BaseModel):
    """A model without further fields, unchangeable, whose NaN and infinity become null in JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")


class Finding(FrozenModel):
    """Something that is wrong, or that a reader must know."""

    name: FindingName = Field(description="what --fail-on names")
    severity: Severity
    says: Literal["cause", "symptom"] = Field(
        "cause", description="symptom: several causes remain, as ``ruled_out`` and ``or_else`` say"
    )
    title: str = Field(description="one plain sentence")
    evidence: str = Field(description="the figures that it rests on")
    fix: str = Field(description="what to do about it")
    rollouts: tuple[int, ...] = Field((), description="ids of the rollouts that show it; empty: all")
    threshold: str = Field("", description="what the figures had to exceed")
    ruled_out: str = Field("", description="the next explanation, and what speaks against it")
    or_else: tuple[FindingName, ...] = Field(
        (), description="findings that the dump cannot tell from this one; empty: it is this one"
    )

    @property
    def rank(self) -> int:
        """By severity: 0 is an error."""
        return get_args(Severity).index(self.severity)

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong; a note only says what a reader must know."""
        return self.severity != "note"


class Looked(FrozenModel):
    """What a detector did with a run."""

    name: FindingName
    state: Literal["found", "nothing", "could not look", "left to another"]
    detail: str = Field("", description="threshold; what it would need; the finding that looks alike")


class Numbers(FrozenModel):
    """Sizes and distances between the policies, of a rollout or of a run."""

    tokens: int = Field(0, description="response tokens with mask 1")
    sequences: int = 0
    nonfinite: int = Field(
        0, description="of the tokens, those without a behavior log-prob, or a finite one of the trainer"
    )
    mean: float | None = Field(None, description="mean l; k1 is its negative")
    absolute: float | None = Field(None, description="mean |l|")
    k3: float | None = Field(None, description="mean e^l - 1 - l, estimates KL(behavior || proximal)")
    kl: float | None = Field(
        None, description="KL(behavior || proximal) over recorded heads, all beyond a head as one token"
    )
    tail: float | None = Field(None, description="mean probability that recorded heads leave out")
    chi2_token: float | None = Field(None, description="mean e^2l - 1")
    chi2_sequence: float | None = Field(None, description="the same of the sums of l over sequences")
    ess_token: float | None = Field(None, description="effective sample size of e^l, in (0, 1]")
    ess_geometric: float | None = Field(None, description="of the geometric means of sequences")
    ess_sequence: float | None = Field(None, description="of the products over sequences")
    log_ratio_max: float | None = Field(None, description="largest |l|")
    differing_fraction: float | None = Field(
        None, description="share of tokens whose two log-probs differ in any bit"
    )
    ratio_p01: float | None = Field(
        None, description="1st percentile of e^l, l rounded towards 0 by at most 0.4%"
    )
    ratio_p50: float | None = Field(None, description="median of e^l, likewise")
    ratio_p99: float | None = Field(None, description="99th percentile of e^l, likewise")
    perplexity_behavior: float | None = None
    perplexity_proximal: float | None = None
    reward: float | None = Field(None, description="mean over sequences")
    response_length: float | None = Field(None, description="mean, tokens")
    staleness: float | None = Field(None, description="mean age of the sampling weights, weight versions")


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
    """One place on a curve: the tokens (of an outcome or a length: of the sequences) around x."""

    x: float
    count: int = Field(description="tokens")
    mean: float = Field(description="mean l")
    absolute: float = Field(description="mean |l|")
    label: str | None = Field(None, description="what to write instead of x, e.g. correct")


class Curve(FrozenModel):
    """The log-ratio as a function of something."""

    name: CurveName
    points: tuple[Point, ...]


class Span(FrozenModel):
    """A token of a worst sample, for its text to be coloured by l."""

    text: str
    log_ratio: float | None = Field(None, description="null: prompt, tool output or not finite")


class Worst(FrozenModel):
    """A sample or a token with a large log-ratio."""

    kind: Literal["sequence", "token"]
    rollout_id: int
    position: int = Field(description="in the rollout's dump")
    token: int | None = Field(None, description="position in the response, of a token")
    log_ratio: float = Field(description="of the token; of a sequence its sum of l")
    tokens: int = Field(description="response tokens of the sample")
    reward: float | None = None
    text: str = Field("", description="response, or what surrounds the token")
    spans: tuple[Span, ...] = ()


class Effect(FrozenModel):
    """What a correction would have done to the rollouts."""

    name: str
    formula: str = ""
    source: str = ""
    numerator: Literal["proximal", "target"] = "proximal"
    unavailable: str | None = Field(None, description="why there are no numbers")
    tokens: int = Field(0, description="response tokens that it saw")
    kept_tokens: int = 0
    sequences: int = Field(0, description="sequences with a response token")
    kept_sequences: int = Field(0, description="sequences that keep a token")
    clipped_tokens: int = Field(0, description="tokens whose weight or ratio a bound changed")
    weight_mean: float | None = Field(None, description="of kept tokens")
    weight_quantiles: dict[str, float] = Field(
        default_factory=dict, description="exact up to 0.4%, kept tokens; keys min p01 p50 p99 max"
    )
    ess: float | None = Field(None, description="of the weights, rejected tokens as 0: (sum w)^2 / n sum w^2")
    kept_positive: float | None = Field(None, description="share of sum A over A > 0 that is kept")
    kept_negative: float | None = Field(None, description="share of sum |A| over A < 0 that is kept")
    gradient_scale: float | None = Field(
        None, description="sum |d loss / d log target| / sum |A| where target = proximal; 1 is uncorrected"
    )
    centering: float | None = Field(
        None, description="sum |A C| / sum |A|, nats: how much center adds to the loss; None without center"
    )
    rejected: dict[str, str] = Field(
        default_factory=dict,
        description="rollout id -> positions of wholly rejected sequences, as 0-3,7",
    )


class Candidate(FrozenModel):
    """A correction that was considered, and why it was chosen or passed over."""

    name: str
    chosen: bool = Field(description="to train with, or to try beside a run without")
    reason: str


class Recommendation(FrozenModel):
    """The correction to train with."""

    name: str
    reasons: tuple[str, ...]
    flags: str = Field(description="what to add to the launch command; empty before a fault is fixed")
    candidates: tuple[Candidate, ...] = ()
    is_made: bool = Field(
        True, description="false: a fault comes first, or too little data; metrics_only then"
    )


class Suggestion(FrozenModel):
    """Thresholds at which a rejection drops a wished share of its units."""

    name: str
    unit: Literal["token", "sequence"]
    wished: float
    reached: float = Field(description="the largest share not above the wished one that ties allow")
    low: float | None = None
    high: float | None = None
    units: int = Field(description="tokens or sequences that the quantiles are over")
    config: str = Field(description="YAML for --custom-config-path")


class FirstDifference(FrozenModel):
    """The first response token whose two log-probs differ."""

    rollout_id: int
    position: int = Field(description="of the sample in the rollout's dump")
    token: int = Field(description="position in the response")
    sampler: str = Field(description="log-prob as float.hex() writes it")
    trainer: str = Field(description="likewise")
    bits: int = Field(description="of 32, those that differ")


class PartOfRun(FrozenModel):
    """Response tokens of a rollout, or at some place in the response."""

    label: str
    tokens: int
    differing: int


class Exact(FrozenModel):
    """Whether the two log-probs of every response token are equal, bit for bit (``--expect exact``)."""

    tokens: int
    differing: int = Field(description="tokens whose log-probs differ, or that lack one")
    largest: float = Field(description="largest |l|, nats")
    first: FirstDifference | None = None
    by_rollout: tuple[PartOfRun, ...] = ()
    by_position: tuple[PartOfRun, ...] = ()
    precision: str = Field("", description="which side lost digits, where they tell")


@dataclass(frozen=True)
class Skipped:
    """A file, or a part of one, that was not analysed."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Document(FrozenModel):
    """Everything that was found in a run."""

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
    distribution: tuple[Bin, ...] = ()
    curves: tuple[Curve, ...] = ()
    timeline: tuple[Moment, ...] = ()
    worst: tuple[Worst, ...] = ()
    effects: tuple[Effect, ...] = ()
    recommendation: Recommendation | None = None
    headline: str = Field("", description="what to do next, in one line")
    suggestions: tuple[Suggestion, ...] = ()
    exact: Exact | None = Field(None, description="null without --expect exact")

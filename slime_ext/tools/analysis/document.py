"""Defines the result of an analysis as plain data.

It is the JSON of ``--json``, and the page is drawn from it.

The page shows nothing that is not in here, so both say the same. Unless a field says otherwise, l is
log numerator - log behavior of a response token in nats, and the numerator is the proximal policy. An unknown
number is null. ``adapter().json_schema()`` is the schema.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from slime_ext.tools.analysis.texts import encodable

if TYPE_CHECKING:
    from pydantic import TypeAdapter

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
FindingName = Literal[FINDINGS]
CurveName = Literal["position", "staleness", "probability", "length", "turn", "outcome"]


def about(description: str) -> dict[str, str]:
    """Returns the metadata of a field with a description, which ``adapter`` puts into the schema."""
    return {"description": description}


class DocumentPart:
    """A part of the document: frozen, and refuses unknown fields. NaN and infinity become null in JSON."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "ser_json_inf_nan": "null"}

    def __post_init__(self) -> None:
        """Makes texts encodable, because they may name a file with bytes that are not UTF-8."""
        for name, value in vars(self).items():
            if type(value) is tuple or (isinstance(value, str) and not value.isascii()):
                object.__setattr__(self, name, _encodable(value))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Skipped):
        return Skipped(encodable(value.path), encodable(value.reason))
    return tuple(map(_encodable, value)) if type(value) is tuple else value


@dataclass(frozen=True, kw_only=True)
class Finding(DocumentPart):
    """A fault of the run, or a fact that its reader must know."""

    name: FindingName = field(metadata=about("what --fail-on names"))
    severity: Severity
    says: Literal["cause", "symptom"] = field(
        default="cause",
        metadata=about("symptom: several causes remain, which ``ruled_out`` and ``or_else`` name"),
    )
    title: str = field(metadata=about("one plain sentence"))
    evidence: str = field(metadata=about("the figures that show it"))
    fix: str = field(metadata=about("what to do about it"))
    rollouts: tuple[int, ...] = field(
        default=(), metadata=about("ids of the rollouts that show it; empty: all of them")
    )
    threshold: str = field(default="", metadata=about("what the figures had to exceed for this finding"))
    ruled_out: str = field(
        default="", metadata=about("the next likely explanation, and the evidence against it")
    )
    or_else: tuple[FindingName, ...] = field(
        default=(),
        metadata=about("findings that the dump cannot tell from this one; empty: no other remains"),
    )
    explains: float | None = field(
        default=None,
        metadata=about("share of k3 that goes if the finding's tokens become like all others; null: unknown"),
    )
    explains_error: float | None = field(default=None, metadata=about("standard error of ``explains``"))

    @property
    def rank(self) -> int:
        """The rank of the severity: 0 is an error, 1 a warning, 2 a note."""
        return get_args(Severity).index(self.severity)

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong; a note only says what a reader must know."""
        return self.severity != "note"


State = Literal["found", "nothing", "could not look", "left to another", "excluded"]


@dataclass(frozen=True, kw_only=True)
class Looked(DocumentPart):
    """The result of one detector on a run."""

    name: FindingName
    state: State
    detail: str = field(
        default="",
        metadata=about(
            "the threshold, what the detector needs, the finding that it is left to, or the identity "
            "that excludes its cause, by ``state``"
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Record(DocumentPart):
    """Whether tokens were drawn from the distribution whose log-probs the sampler recorded."""

    side: Literal["honest", "altered", "unknown"] = field(
        metadata=about(
            "honest: as far as the mean ratio tells, so no altered record makes most of k3; "
            "altered: not all of them, so old weights, precision, noise and routing do not make it; unknown: "
            "too uncertain"
        )
    )
    mean_ratio: float | None = field(
        default=None,
        metadata=about("mean e^l over tokens, at most 10 each, which is 1 for tokens that were drawn so"),
    )
    error: float | None = field(default=None, metadata=about("standard error of ``mean_ratio`` over samples"))
    where: str = field(
        default="", metadata=about("the part of the run that ``mean_ratio`` is of; empty: all of it")
    )
    said: str = field(default="", metadata=about("the same in a sentence"))


@dataclass(frozen=True, kw_only=True)
class Numbers(DocumentPart):
    """Sizes, and distances between the policies, of one rollout or of a run."""

    tokens: int = field(default=0, metadata=about("response tokens with mask 1"))
    sequences: int = 0
    nonfinite: int = field(
        default=0, metadata=about("tokens that lack a behavior log-prob, or a finite log-prob of the trainer")
    )
    mean: float | None = field(default=None, metadata=about("mean l; k1 is its negative"))
    absolute: float | None = field(default=None, metadata=about("mean |l|"))
    k3: float | None = field(
        default=None, metadata=about("mean e^l - 1 - l, which estimates KL(behavior || proximal)")
    )
    kl: float | None = field(
        default=None,
        metadata=about("KL(behavior || proximal) over recorded heads; the tokens beyond a head count as one"),
    )
    tail: float | None = field(
        default=None, metadata=about("mean probability of the tokens beyond the recorded heads")
    )
    chi2_token: float | None = field(default=None, metadata=about("mean e^2l - 1"))
    chi2_sequence: float | None = field(
        default=None, metadata=about("mean e^2L - 1 over sequences, L the sum of l over a sequence")
    )
    ess_token: float | None = field(default=None, metadata=about("effective sample size of e^l, in (0, 1]"))
    ess_geometric: float | None = field(
        default=None, metadata=about("the same of the sequences' geometric mean ratios")
    )
    ess_sequence: float | None = field(
        default=None, metadata=about("the same of the products of ratios over sequences")
    )
    log_ratio_max: float | None = field(default=None, metadata=about("largest |l|"))
    differing_fraction: float | None = field(
        default=None, metadata=about("share of tokens whose two log-probs differ in any bit")
    )
    ratio_p01: float | None = field(
        default=None, metadata=about("1st percentile of e^l; l is rounded towards 0 by at most 0.4%")
    )
    ratio_p50: float | None = field(default=None, metadata=about("median of e^l, rounded alike"))
    ratio_p99: float | None = field(default=None, metadata=about("99th percentile of e^l, rounded alike"))
    perplexity_behavior: float | None = None
    perplexity_proximal: float | None = None
    reward: float | None = field(default=None, metadata=about("mean over sequences"))
    response_length: float | None = field(default=None, metadata=about("mean over sequences, tokens"))
    staleness: float | None = field(
        default=None, metadata=about("mean age of the sampling weights, weight versions")
    )
    least_staleness: float | None = field(
        default=None,
        metadata=about(
            "a lower bound of the mean rollouts trained since the sampling weights; null: no guess"
        ),
    )
    most_staleness: float | None = field(
        default=None, metadata=about("an upper bound of the same; null: none is known (it needs rollout 0)")
    )


@dataclass(frozen=True, kw_only=True)
class Moment(DocumentPart):
    """The numbers of one rollout."""

    rollout_id: int
    numbers: Numbers


@dataclass(frozen=True, kw_only=True)
class Bin(DocumentPart):
    """One bar of the distribution of l: low <= l < high."""

    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Point(DocumentPart):
    """A point of a curve: the number of tokens around x, and their means."""

    x: float
    count: int = field(metadata=about("tokens"))
    mean: float = field(metadata=about("mean l"))
    absolute: float = field(metadata=about("mean |l|"))
    label: str | None = field(
        default=None, metadata=about("the name of x, such as correct; null: x is shown")
    )


@dataclass(frozen=True, kw_only=True)
class Curve(DocumentPart):
    """The log-ratio as a function of something."""

    name: CurveName
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Span(DocumentPart):
    """A token of a worst sample. The page colours its text by l."""

    text: str
    log_ratio: float | None = field(
        default=None, metadata=about("null: the token is of a prompt or tool, or l is not finite")
    )


@dataclass(frozen=True, kw_only=True)
class Worst(DocumentPart):
    """A sample or a token with a large log-ratio."""

    kind: Literal["sequence", "token"]
    rollout_id: int
    position: int = field(metadata=about("of the sample in the rollout's dump"))
    token: int | None = field(default=None, metadata=about("position in the response; null for a sequence"))
    log_ratio: float = field(metadata=about("l of the token, or the sum of l over the sequence"))
    tokens: int = field(metadata=about("response tokens of the sample"))
    reward: float | None = None
    text: str = field(default="", metadata=about("the response, or the text around the token"))
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Effect(DocumentPart):
    """The effect that a correction would have had on the rollouts."""

    name: str
    formula: str = ""
    source: str = ""
    numerator: Literal["proximal", "target"] = "proximal"
    unavailable: str | None = field(default=None, metadata=about("why there are no numbers"))
    tokens: int = field(default=0, metadata=about("response tokens that the correction saw"))
    kept_tokens: int = 0
    sequences: int = field(default=0, metadata=about("sequences with a response token"))
    kept_sequences: int = field(default=0, metadata=about("sequences of which a token is kept"))
    clipped_tokens: int = field(default=0, metadata=about("tokens whose weight or ratio was clipped"))
    weight_mean: float | None = field(default=None, metadata=about("mean weight of kept tokens"))
    weight_quantiles: dict[str, float] = field(
        default_factory=dict, metadata=about("of kept tokens, exact up to 0.4%; keys: min p01 p50 p99 max")
    )
    ess: float | None = field(
        default=None, metadata=about("(sum w)^2 / (n sum w^2); rejected tokens have weight 0")
    )
    kept_positive: float | None = field(
        default=None, metadata=about("share of sum A over A > 0 that is kept")
    )
    kept_negative: float | None = field(
        default=None, metadata=about("share of sum |A| over A < 0 that is kept")
    )
    gradient_scale: float | None = field(
        default=None,
        metadata=about(
            "sum |d loss / d log target| / sum |A| at target = proximal; 1: as without a correction"
        ),
    )
    centering: float | None = field(
        default=None,
        metadata=about("sum |A C| / sum |A|, nats: how much center adds to the loss; null without center"),
    )
    rejected: dict[str, str] = field(
        default_factory=dict,
        metadata=about("rollout id -> positions of sequences without a kept token, such as 0-3,7"),
    )


@dataclass(frozen=True, kw_only=True)
class Candidate(DocumentPart):
    """A correction that was considered, and the reason why it was chosen or not."""

    name: str
    chosen: bool = field(metadata=about("true: train with it, or try it beside an uncorrected run"))
    reason: str


@dataclass(frozen=True, kw_only=True)
class Recommendation(DocumentPart):
    """The row of the decision table that applies to a run (``tools/decision.py``)."""

    name: str = field(metadata=about("the correction to compare with uncorrected runs, or metrics_only"))
    reasons: tuple[str, ...] = field(
        metadata=about("the row and why it applies, what to do, and what it costs")
    )
    flags: str = field(metadata=about("what to add to the launch command; empty before a fault is fixed"))
    candidates: tuple[Candidate, ...] = ()
    is_made: bool = field(
        default=True,
        metadata=about("false: fix a fault first, or record more data; ``name`` is then metrics_only"),
    )


@dataclass(frozen=True, kw_only=True)
class Suggestion(DocumentPart):
    """The thresholds at which a rejection drops at most the requested share of its units."""

    name: str
    unit: Literal["token", "sequence"]
    wished: float
    reached: float = field(
        metadata=about("the largest possible share that is not above ``wished``; ties limit it")
    )
    low: float | None = None
    high: float | None = None
    units: int = field(metadata=about("how many tokens or sequences the run has"))
    config: str = field(metadata=about("YAML for --custom-config-path"))


@dataclass(frozen=True, kw_only=True)
class FirstDifference(DocumentPart):
    """The first response token whose two log-probs differ."""

    rollout_id: int
    position: int = field(metadata=about("of the sample in the rollout's dump"))
    token: int = field(metadata=about("position in the response"))
    sampler: str = field(metadata=about("log-prob as float.hex() writes it"))
    trainer: str = field(metadata=about("log-prob as float.hex() writes it"))
    bits: int = field(metadata=about("how many of the 32 bits differ"))


@dataclass(frozen=True, kw_only=True)
class PartOfRun(DocumentPart):
    """The response tokens of one rollout, or of one range of positions."""

    label: str
    tokens: int
    differing: int


@dataclass(frozen=True, kw_only=True)
class Exact(DocumentPart):
    """The comparison of both log-probs of every response token, bit for bit (``--expect exact``)."""

    tokens: int
    differing: int = field(metadata=about("tokens whose log-probs differ, or that lack one"))
    largest: float = field(metadata=about("largest |l|, nats"))
    first: FirstDifference | None = None
    by_rollout: tuple[PartOfRun, ...] = ()
    by_position: tuple[PartOfRun, ...] = ()
    precision: str = field(default="", metadata=about("which side lost digits, if the digits show it"))


@dataclass(frozen=True)
class Skipped:
    """A file, or a part of a file, that was not analysed."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Document(DocumentPart):
    """Everything that the analysis found in a run."""

    version: int = VERSION
    name: str
    paths: tuple[str, ...] = ()
    made_with: str = ""
    skipped: tuple[Skipped, ...] = ()
    unread: str = field(
        default="", metadata=about("how much of the run could not be read; empty: all of it was")
    )
    notes: tuple[str, ...] = ()
    total: Numbers = Numbers()
    findings: tuple[Finding, ...] = ()
    detectors: tuple[Looked, ...] = ()
    record: Record | None = field(default=None, metadata=about("the first split of all causes"))
    distribution: tuple[Bin, ...] = ()
    curves: tuple[Curve, ...] = ()
    timeline: tuple[Moment, ...] = ()
    worst: tuple[Worst, ...] = ()
    effects: tuple[Effect, ...] = ()
    recommendation: Recommendation | None = None
    headline: str = field(default="", metadata=about("what to do next, in one line"))
    suggestions: tuple[Suggestion, ...] = ()
    exact: Exact | None = field(default=None, metadata=about("null without --expect exact"))

    @property
    def is_whole(self) -> bool:
        """Whether every file, line and sample was read."""
        return not (self.skipped or self.unread)


@cache
def adapter() -> TypeAdapter[Document]:
    """Returns what writes a document as JSON, reads it back, and knows the schema.

    It is made when it is first needed, because pydantic takes longer than the analysis of a small run.
    """
    from pydantic import TypeAdapter

    return TypeAdapter(Document)


def json_of(document: Document, indent: int | None = None) -> str:
    """Returns a document as JSON."""
    return adapter().dump_json(document, indent=indent).decode()

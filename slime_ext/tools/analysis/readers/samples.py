"""Turns a sample of any file into a ``DumpedSample``, and samples into one ``DumpedRollout``.

A rollout may hold thousands of short samples. So only fields are handled sample by sample, and all
computation is over packed tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from numbers import Integral
from typing import Any

import numpy
import torch
from torch import Tensor

from slime_ext.errors import cut
from slime_ext.hosts.contract import MOST_DIGITS, number_of, versions_of
from slime_ext.ops.segments import Segments
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers.spilled import loaded
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.texts import encodable

UNKNOWN = -1  # version of unknown weights, or id of an unknown token
NO_NUMBERS = (TypeError, ValueError, RuntimeError, OverflowError)  # errors of ``as_tensor``
# Fields with one value per response token -> dtype, value for samples without the field, and its names in
# rollout dumps, train dumps and JSONL.
FIELDS: dict[str, tuple[torch.dtype, float, tuple[str, ...]]] = {
    "behavior": (torch.float32, torch.nan, ("rollout_log_probs", "behavior")),
    "proximal": (torch.float32, torch.nan, ("log_probs", "train_log_probs", "proximal")),
    "mask": (torch.float32, 1.0, ("loss_masks", "loss_mask", "mask")),
    "tokens": (torch.int64, UNKNOWN, ()),
    "advantages": (torch.float32, 0.0, ()),
    "entropy": (torch.float32, torch.nan, ("entropy",)),
    "reference": (torch.float32, torch.nan, ("ref_log_probs",)),
    "kept": (torch.float32, torch.nan, ()),
    "overlap": (torch.float32, torch.nan, ()),
    "kl": (torch.float32, torch.nan, ()),
    "tail": (torch.float32, torch.nan, ()),
}
MOST_CANDIDATES = 1 << 28  # values in the heads of a rollout; both sides then take 2 GiB
ALWAYS = ("behavior", "proximal", "mask")  # the FIELDS that every rollout has
# Keys of a sample or of its metadata that name the engine that sampled it. slime and vime record no engine,
# and miles only for agents (session_server_id). A custom generate function can record it.
ENGINES = ("engine", "engine_id", "engine_url", "worker_id", "worker_url", "server_url", "session_server_id")
ENGINE_RANK = "dp_rank"  # data-parallel rank inside an engine: SGLang's meta_info["dp_rank"]


@dataclass
class DumpedSample:
    """One sample of a file: lists or tensors over the response [R], and defaults for missing fields."""

    position: int
    response_length: int
    behavior: Any = None
    proximal: Any = None
    mask: Any = None
    tokens: Any = None
    advantages: Any = None
    entropy: Any = None
    reference: Any = None
    kept: Any = None
    overlap: Any = None
    kl: Any = None
    tail: Any = None
    sampler_head: Any = None  # log-probs [R, K] of the sampler's most likely tokens
    trainer_head: Any = None  # the trainer's of the same tokens
    sampler_support: Any = None  # log-probs [N] of all tokens that top-p kept, position after position
    trainer_support: Any = None  # the trainer's of the same tokens
    support_offsets: Any = None  # [R + 1]
    heads: tuple[Tensor, Tensor] | None = (
        None  # log-probs [R, K] of sampler and trainer, of heads or of supports
    )
    is_exact: bool = False  # true: ``heads`` are supports
    ids: Any = None  # tokens of prompt and response
    routed: Any = None  # experts of the side that wrote the file, [tokens - 1, layers, active]
    index: int | None = None  # of the sample in the run
    status: str = ""
    prompt_length: int = 0
    reward: float | None = None
    group: int | None = None
    step: int | None = None
    cached: int | None = None  # number of prompt tokens from the prefix cache
    rank: int | None = None  # data-parallel rank of the trainer
    place: int | None = None  # how many samples come before it in its micro-batch
    engine: str = ""
    prompt: str = ""
    response: str = ""
    weight_versions: Sequence[str] = ()
    token_versions: Sequence[str] = ()


def sample_of(fields: Mapping[str, Any], position: int, step: int | None = None) -> DumpedSample:
    """Returns the sample of a line of JSONL, or of a sample in slime's dumps."""
    lists = {ours: first(fields, *names) for ours, (_, _, names) in FIELDS.items()}
    known = next((v for v in (lists["behavior"], lists["proximal"]) if v is not None), ())
    length = first(fields, "response_lengths", "response_length")
    length, ids = len(known) if length is None else int(length), fields.get("tokens")
    count, advantages = length if ids is None else len(ids), fields.get("advantages")
    total = max(int(first(fields, "total_lengths") or count), length)
    prompt_length = int(first(fields, "prompt_length", default=total - length))
    if abs(prompt_length) >= 10**MOST_DIGITS:
        raise ValueError(f"expected a prompt_length of at most {MOST_DIGITS} digits, got a longer one")
    caching, is_one = fields.get("prefix_cache_info"), isinstance(advantages, (int, float))
    lists |= {
        "tokens": None if ids is None or count < length else ids[count - length :],
        "advantages": [advantages] * length if is_one else advantages,
        "kept": kept_sizes(fields, length, ids),
    }
    return DumpedSample(
        position,
        length,
        **lists,
        ids=ids,
        step=step,
        sampler_head=fields.get("rollout_topk_log_probs"),
        trainer_head=fields.get("topk_log_probs"),
        sampler_support=fields.get("rollout_top_p_log_probs"),
        trainer_support=fields.get("top_p_log_probs"),
        support_offsets=fields.get("rollout_top_p_token_offsets"),
        routed=first(fields, "rollout_routed_experts", "routed_experts"),
        index=whole_number(fields.get("index")),
        status=cut(text(fields.get("status"))) or ("truncated" if fields.get("truncated") == 1 else ""),
        prompt_length=prompt_length,
        reward=number(first(fields, "local_raw_reward", "reward", "rewards")),
        group=group_number(fields.get("group_index")),
        cached=whole_number(caching.get("cached_tokens")) if isinstance(caching, Mapping) else None,
        rank=whole_number(fields.get("data_parallel_rank")),
        engine=engine_of(fields),
        prompt=text(fields.get("prompt")),
        response=text(fields.get("response")),
        weight_versions=versions_of(fields.get("weight_versions")),
        token_versions=versions_of(fields.get("token_weight_versions")),
    )


def first(fields: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """Returns the first value that is present and not null, in the order of the names."""
    for name in names:
        if (value := fields.get(name)) is not None:
            return value
    return default


def engine_of(fields: Mapping[str, Any]) -> str:
    """Returns the name of the engine that sampled a sample, with the rank inside it; empty if unknown.

    >>> engine_of({"metadata": {"engine_url": "http://node3:15000", "dp_rank": 1}}), engine_of({})
    ('http://node3:15000 dp 1', '')
    """
    metadata = fields.get("metadata")
    places = (fields, metadata) if isinstance(metadata, Mapping) and metadata else (fields,)
    engine, rank = _label(places, ENGINES), _label(places, (ENGINE_RANK,))
    return f"{engine} dp {rank}".strip() if rank else engine


def _label(places: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    for place in places:
        if isinstance(value := first(place, *names), (str, Integral)):
            return encodable(cut(value))
    return ""


@dataclass
class Notes:
    """Remarks about samples. Remarks of one kind become one line with their number and the first sample.

    Args:
        kinds: kind -> the samples.
        lacking: reason -> position of a sample -> fields that it lacks.
    """

    kinds: dict[str, list[str]] = field(default_factory=dict)
    lacking: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def add(self, kind: str, row: DumpedSample, more: str = "") -> None:
        self.kinds.setdefault(kind, []).append(f"sample {row.position}{more}")

    def lack(self, name: str, position: int, why: str) -> None:
        """Adds that a sample lacks a field. One reason becomes one line, whatever the fields are."""
        self.lacking.setdefault(why, {}).setdefault(position, set()).add(name)

    def lines(self) -> tuple[str, ...]:
        lacking = {
            f"without {', '.join(sorted(set().union(*names.values())))}: {why}": [
                f"sample {i}" for i in names
            ]
            for why, names in self.lacking.items()
        }
        return tuple(
            f"{len(v)} sample{'s' * (len(v) > 1)} {kind} (first: {v[0]})"
            for kind, v in (self.kinds | lacking).items()
        )


def assemble(
    rollout_id: int, source: str, rows: Sequence[DumpedSample], notes: Notes, **of_all: Any
) -> DumpedRollout | Skipped:
    """Returns the rollout of some samples, without those whose lists do not fit.

    Args:
        notes: remarks of the caller, to which more are added.
        of_all: fields of ``DumpedRollout`` that concern the whole rollout.
    """
    if reason := _missing(rows):
        return Skipped(source, reason)
    sound = [row for row in rows if _fits(row, notes)]
    if not sound:
        return Skipped(source, "holds no usable sample: " + notes.lines()[0])
    packed = {name: _packed(sound, name) for name in FIELDS}
    packed["mask"] = packed["mask"] != 0
    versions = _versions(sound, packed["mask"], notes)
    return DumpedRollout(
        rollout_id=rollout_id,
        source=source,
        lengths=tuple(row.response_length for row in sound),
        prompt_lengths=tuple(row.prompt_length for row in sound),
        positions=tuple(row.position for row in sound),
        **packed,
        **_heads(sound),
        rewards=_rewards([row.reward for row in sound]),
        versions=versions,
        newest=_newest(versions),
        groups=_all([row.group for row in sound]),
        steps=_all([row.step for row in sound]),
        cached=_all([row.cached for row in sound]),
        ranks=_all([row.rank for row in sound]),
        places=_all([row.place for row in sound]),
        engines=tuple(row.engine for row in sound) if any(row.engine for row in sound) else None,
        statuses=tuple(row.status for row in sound),
        prompts=[row.prompt for row in sound],
        responses=[row.response for row in sound],
        left_out=len(rows) - len(sound),
        notes=notes.lines(),
        **of_all,
    )


def _missing(rows: Sequence[DumpedSample]) -> str:
    if not rows:
        return "holds no sample"
    if all(row.proximal is None for row in rows):
        return (
            "has no log-probs of the trainer (log_probs): name the train dump of the same rollout as well; "
            "slime v0.3.0 and v0.3.1 write them only with --get-mismatch-metrics"
        )
    if all(row.behavior is None for row in rows):
        return "has no log-probs of the sampler (rollout_log_probs): slime records them with --use-tis"
    return ""


def _fits(row: DumpedSample, notes: Notes) -> bool:
    """Turns the lists of a sample into tensors. Returns whether all have the length of the response."""
    if row.proximal is None:
        notes.add("skipped because the trainer's log-probs are missing", row)
        return False
    for name in FIELDS:
        if (values := getattr(row, name)) is None:
            continue
        try:
            tensor = as_tensor(values, FIELDS[name][0])
        except NO_NUMBERS:
            notes.add("skipped because a list holds something other than numbers", row, f", {name}")
            return False
        if len(tensor) != row.response_length:
            lengths = f", {name} {len(tensor)}, response {row.response_length}"
            notes.add("skipped because a list has another length than the response", row, lengths)
            return False
        setattr(row, name, tensor)
    if row.behavior is None:
        notes.add("without log-probs of the sampler", row)
    return True


def _packed(rows: Sequence[DumpedSample], name: str) -> Tensor | None:
    """Returns a field of all rows in one flat tensor; None if no row has an optional field.

    Removes it from the rows, so that it is in memory only once.
    """
    if name not in ALWAYS and all(getattr(row, name) is None for row in rows):
        return None
    dtype, missing, _ = FIELDS[name]
    parts = []
    for row in rows:
        values = getattr(row, name)
        parts.append(torch.full((row.response_length,), missing, dtype=dtype) if values is None else values)
        setattr(row, name, None)
    return torch.cat(parts)


def as_tensor(values: Any, dtype: torch.dtype) -> Tensor:
    """Returns a CPU tensor [R] from an array, a tensor or a list; None means NaN.

    Raises:
        TypeError, ValueError, RuntimeError, OverflowError: the value is not a list of numbers.
    """
    if type(values) is Tensor and values.dtype == dtype and values.dim() == 1 and values.is_cpu:
        return values.detach()  # the most frequent case
    values = loaded(values)
    if isinstance(values, (list, tuple)):
        code = "q" if dtype == torch.int64 else "d"
        try:
            numbers = array(code, values)
        except TypeError:
            numbers = array(code, [torch.nan if v is None else v for v in values])
        values = numpy.array(numbers)
    tensor = torch.as_tensor(values).detach().to("cpu", dtype)
    if tensor.dim() != 1:
        raise ValueError(f"expected a list of numbers, got one of shape {list(tensor.shape)}")
    return tensor


def _all(values: list[int | None]) -> tuple[int, ...] | None:
    return None if None in values else tuple(values)  # type: ignore[arg-type]


def _heads(rows: Sequence[DumpedSample]) -> dict[str, Any]:
    """Returns the heads of a rollout, padded to one width; {} unless all samples have the same kind."""
    heads = [row.heads for row in rows if row.heads is not None]
    if len(heads) < len(rows) or len({row.is_exact for row in rows}) != 1:
        return {}
    width = max(sampler.shape[1] for sampler, _ in heads)
    if not rows[0].is_exact and any(sampler.shape[1] != width for sampler, _ in heads):
        return {}
    if width * sum(map(len, (sampler for sampler, _ in heads))) > MOST_CANDIDATES:
        return {}

    def padded(sides: Iterable[Tensor]) -> Tensor:
        pads = [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=torch.nan) for x in sides]
        return torch.cat(pads)

    sampler, trainer = (padded(sides) for sides in zip(*heads, strict=True))
    return {"sampler_head": sampler, "trainer_head": trainer, "is_exact": rows[0].is_exact}


def _rewards(values: list[float | None]) -> Tensor | None:
    known = [torch.nan if value is None else value for value in values]
    return torch.tensor(known, dtype=torch.float64) if any(v is not None for v in values) else None


def _newest(versions: Tensor | None) -> int | None:
    newest = UNKNOWN if versions is None or not len(versions) else int(versions.max())
    return None if newest == UNKNOWN else newest


def rollout_number(value: Any) -> int:
    """Returns the rollout number from the value in a file.

    Raises:
        TypeError, ValueError, OverflowError: not a number, or more digits than an int64 holds.
    """
    rollout_id = int(value)
    if abs(rollout_id) >= 10**MOST_DIGITS:
        raise ValueError(f"expected a rollout number of at most {MOST_DIGITS} digits, got a longer one")
    return rollout_id


def _versions(rows: list[DumpedSample], mask: Tensor, notes: Notes) -> Tensor | None:
    """Returns the weight version of each token, [T]; None if no row has any."""
    if not any(row.weight_versions or row.token_versions for row in rows):
        return None
    lengths = [row.response_length for row in rows]
    if all(len(row.weight_versions) == 1 and not row.token_versions for row in rows):
        alike = torch.tensor([_number(row.weight_versions[0]) for row in rows])
        return alike.repeat_interleave(torch.tensor(lengths))
    masks = mask.split(lengths)
    return torch.cat([_versions_of(row, row_mask, notes) for row, row_mask in zip(rows, masks, strict=True)])


def _versions_of(row: DumpedSample, mask: Tensor, notes: Notes) -> Tensor:
    """Returns the weight version of each token, [R]."""
    by_token = len(row.token_versions) == row.response_length > 0
    numbers = [_number(version) for version in (row.token_versions if by_token else row.weight_versions)]
    if by_token:
        return torch.tensor(numbers)
    if len(set(numbers)) > 1:
        turns = Segments.whole([len(mask)], mask).turn_ids
        if len(mask) and int(turns[-1]) == len(numbers):  # one engine call per turn
            return torch.tensor(numbers)[(turns.long() - 1).clamp(min=0)]
        notes.add("with several weight versions at unknown tokens, which count as the oldest", row)
    return torch.full((len(mask),), min(numbers, default=UNKNOWN))


def _number(version: Any) -> int:
    version_number = number_of(version)
    return UNKNOWN if version_number is None else version_number


def kept_sizes(sample: Mapping[str, Any], length: int, tokens: Any) -> Tensor | None:
    """Returns ``DumpedRollout.kept`` of one sample, from slime's replay keys.

    The kept ids of response token i are ids[offsets[i]:offsets[i + 1]] (slime/utils/types.py at 624b824).
    """
    ids, offsets = (sample.get(f"rollout_top_p_token_{name}") for name in ("ids", "offsets"))
    if ids is None or offsets is None:
        return None
    try:
        ids, offsets, drawn = (as_tensor(values, torch.int64) for values in (ids, offsets, tokens))
    except NO_NUMBERS:
        return None
    sizes, drawn = offsets.diff(), drawn[len(drawn) - length :]
    if not len(drawn) == len(sizes) == length or int(sizes.sum()) != len(ids) or bool((sizes < 0).any()):
        return None
    at = torch.repeat_interleave(sizes)
    is_in = torch.zeros(length).index_add(0, at, (ids == drawn[at]).float()) > 0
    return torch.where(sizes == 0, torch.nan, torch.where(is_in, sizes, -sizes).float())


def whole_number(value: Any) -> int | None:
    return int(value) if isinstance(value, Integral) else None


def group_number(value: Any) -> int | None:
    """Returns the number of a prompt, which an int64 holds. A longer number becomes a hash of its digits."""
    known = whole_number(value)
    if known is None or -(1 << 63) <= known < 1 << 63:
        return known
    return int.from_bytes(blake2b(hex(known).encode(), digest_size=8).digest(), "big", signed=True)


def number(value: Any) -> float | None:
    """Returns a reward as a number; None if it is missing or a mapping of rewards."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def text(value: Any) -> str:
    """Returns the text of a string or of a list of chat messages.

    Half a surrogate pair becomes a question mark.
    """
    if isinstance(value, (list, tuple)):
        parts = (part.get("content", "") if isinstance(part, dict) else part for part in value)
        value = "\n".join(part for part in parts if isinstance(part, str))
    return encodable(value) if isinstance(value, str) else ""

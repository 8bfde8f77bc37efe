"""``backend: compiled``: the eager code of a hook call as two graphs for torch.compile.

``head`` computes the statistics of sequences; ``expand`` runs the steps on them, weights the loss and sums
the metrics. Two graphs, because the ranks that share sequences all-reduce in between, and because one graph
would recompute the small [S] part for every token. Sizes are dynamic: each graph is compiled once, on a
made-up batch whose sizes all differ. Without a compiler, for small batches, and for steps that read
statistics of turns, prefixes or minima, ``apply`` runs eager.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from slime_ext.core import correction as eager
from slime_ext.core.correction import Correction, HookInputs, HookResult, corrected, plan_step
from slime_ext.core.losses import Bounds, HostLoss
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.metrics.measure import StepSums, TokenBins, count_bins, position_bins, summarize
from slime_ext.core.state import NO_PLAN, Plan, StatisticKey, Step, Tokens, tabulate
from slime_ext.core.steps import STEPS
from slime_ext.ops.segments import BLOCK, Segments, as_numbers, identity

SMALLEST = 1024  # tokens; below, a compiled call costs more than it saves
SPARE = 2  # empty sequences added to every batch: torch.compile treats sizes 0 and 1 as other programs
MADE_UP = (300, 5, 4, 3, 0, 700, 41, 2, 1, 944)  # lengths of the batch that graphs are compiled on
# On CUDA those lengths times this: a graph made on a few thousand tokens adds up every batch in one block of
# threads, which for 8M tokens takes 40 ms instead of 0.3.
LONGER = 512
OPTIONS: dict[str, Any] = {"assert_indirect_indexing": False}  # the indices are ours
UNCHANGED = cast(Tensor, NotImplemented)  # of a rewrite: the operation stays as it is
Named = dict[str, Tensor]
log = logging.getLogger("slime_ext")


class Wanted(NamedTuple):
    """The key of a graph. Everything else may change from call to call."""

    correction: Correction
    acts: bool
    bounds: Bounds
    layout: MetricsLayout | None
    counts_sequences: bool
    part: str
    device: str
    inputs: tuple[tuple[str, torch.dtype], ...]


def hindrance(device: str) -> str:
    """Why nothing can be compiled for a device; empty if it can."""
    if device == "cpu":
        if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
            return "no C++ compiler is installed"
        has_blank = any(map(str.isspace, torch.__file__))  # torch 2.13 does not quote it for the linker
        return "PyTorch is installed in a path with a blank" if has_blank else ""
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


def describe(asked: bool, correction: Correction) -> str:
    """The backend in a few words, as host start-up prints it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    why = hindrance(device)
    if asked and not why and not _can_serve(correction, device):
        why = "a step of this correction is not compiled: docs/performance.md"
    if not asked or not why:
        return f"backend {'compiled' if asked else 'eager'}"
    return f"backend eager (compiled was asked for, but {why})"


def apply(correction: Correction, inputs: HookInputs) -> HookResult:
    """As ``slime_ext.core.correction.apply``."""
    segments = inputs.tokens.segments
    if segments.size < SMALLEST or not _can_serve(correction, segments.mask.device.type):
        return eager.apply(correction, inputs)
    plan = inputs.plan
    if plan is None:
        plan = plan_step(correction, [inputs.tokens], segments.all_sum) if correction.is_coupled else NO_PLAN
    given = _inputs_of(correction, inputs, plan)
    wanted = functools.partial(
        Wanted, correction, inputs.acts, inputs.bounds, inputs.layout, inputs.counts_sequences
    )
    if _statistics(correction, inputs.layout):
        (table,) = _run(functools.partial(wanted, "head"), given)
        if segments.all_sum is not identity:
            summed = segments.all_sum(table[:, : segments.count].reshape(-1))
            table = pad(summed.view(-1, segments.count), (0, SPARE))
        given["table"] = table
    finite, weights, ratio, clipped, rejected, *rest = _run(functools.partial(wanted, "expand"), given)
    loss = inputs.host_loss
    if inputs.acts:
        slope, loss, *rest = (weights, *rest) if _slope_is_weights(correction, given) else rest
        source = inputs.host_loss if _reads_host_loss(correction, inputs) else inputs.tokens.target
        loss = _KnownLoss.apply(source, loss, slope)  # type: ignore[no-untyped-call]
    result = HookResult(loss, finite.view(torch.bool), weights, ratio, clipped, rejected)
    if inputs.layout is None:
        return result
    sums, (keys, *curves) = StepSums(*rest[:3]), rest[3:]
    bins = TokenBins(keys, curves[0] if curves else None, tuple(curves[1:]))
    return replace(result, measured=count_bins(sums, bins))


@functools.lru_cache(maxsize=256)
def _can_serve(correction: Correction, device: str) -> bool:
    if why := hindrance(device):
        log.warning(
            "slime_ext.backend: expected a compiler beside compiled, got none: %s; it stays eager", why
        )
        return False
    known = all(type(step) in STEPS.values() for step in correction.steps)
    known = known and not correction.terms and correction.center is None
    keys = correction.observed_statistics
    return known and all(key.aggregate == "sum" and key.unit == "sequence" for key in keys)


def _statistics(correction: Correction, layout: MetricsLayout | None) -> tuple[StatisticKey, ...]:
    return correction.statistics if layout is None else correction.observed_statistics


def _reads_host_loss(correction: Correction, inputs: HookInputs) -> bool:
    return isinstance(correction.surrogate, HostLoss) or not inputs.acts


def _slope_is_weights(correction: Correction, given: Named) -> bool:
    """Whether the loss is the host's times the weights, and nothing else."""
    return isinstance(correction.surrogate, HostLoss) and correction.bounds_weights and "scale" not in given


def _inputs_of(correction: Correction, inputs: HookInputs, plan: Plan) -> Named:
    """Every tensor that the graphs read, flags as bytes: Inductor reads and writes bool one by one."""
    tokens, segments = inputs.tokens, inputs.tokens.segments
    padded = Segments((*segments.local_lengths, *(0,) * SPARE), None, segments.mask)
    _, mixed, bounds = padded.blocks
    given = {
        "proximal": tokens.proximal,
        "behavior": tokens.behavior,
        "mask": segments.mask.view(torch.uint8),
        "mixed": mixed,
        "bounds": bounds,
        "ids": padded.ids,
        "host_loss": inputs.host_loss if _reads_host_loss(correction, inputs) else None,
        "target": tokens.target if correction.needs_target else None,
        "advantages": tokens.advantages if correction.needs_advantages else None,
    }
    if inputs.layout is not None and inputs.layout.curves:
        given["position"] = position_bins(segments)
    per_sequence = {"ages": tokens.ages, "age_steps": tokens.age_steps, "scale": plan.scale}
    per_sequence["group"] = None if plan.keep is None else plan.keep.to(torch.uint8)
    given |= {name: None if x is None else pad(x, (0, SPARE)) for name, x in per_sequence.items()}
    given |= {f"number{i}": plan.numbers[step] for i, step in enumerate(_coupled(correction))}
    return {name: values.detach() for name, values in given.items() if values is not None}


def _coupled(correction: Correction) -> list[Step]:
    return [step for step in correction.steps if step.is_coupled]


_graphs: dict[Wanted, Callable[..., tuple[Tensor, ...]]] = {}
_lock = threading.Lock()


def _run(wanted: Callable[..., Wanted], given: Named) -> tuple[Tensor, ...]:
    device = given["mask"].device.type
    key = wanted(device, tuple((name, values.dtype) for name, values in given.items()))
    with _lock:
        if key not in _graphs:
            _graphs[key] = _compile(key, given)
    with torch.no_grad():
        return _graphs[key](*given.values())


def _compile(wanted: Wanted, given: Named) -> Callable[..., tuple[Tensor, ...]]:
    part = {"head": _head, "expand": _expand}[wanted.part]

    def body(*values: Tensor) -> tuple[Tensor, ...]:
        return part(wanted, dict(zip(given, values, strict=True)))

    example = _made_up(given)
    traced = make_fx(body, tracing_mode="symbolic", decomposition_table=FOR_INDUCTOR)(*example)
    with torch.no_grad():
        compiled = torch.compile(traced, dynamic=True, fullgraph=True, options=OPTIONS)
        compiled(*example)
    return compiled


def _head(wanted: Wanted, given: Named) -> tuple[Tensor, ...]:
    correction, keys = wanted.correction, _statistics(wanted.correction, wanted.layout)
    table = tabulate(keys, correction.read(_tokens_of(given)))
    return (torch.stack([table[key] for key in keys]),)


def _expand(wanted: Wanted, given: Named) -> tuple[Tensor, ...]:
    correction, observe, tokens = wanted.correction, wanted.layout is not None, _tokens_of(given)
    numbers = {step: given[f"number{i}"] for i, step in enumerate(_coupled(correction))}
    keys = _statistics(correction, wanted.layout)
    table = dict(zip(keys, given["table"].unbind(), strict=True)) if keys else {}
    keep = given["group"] != 0 if "group" in given else None
    read = replace(correction.read(tokens), table=table, plan=numbers)
    outcome = correction.decide(read, Plan(numbers, given.get("scale"), keep), observe=observe)
    with torch.enable_grad():
        source = given["host_loss" if "host_loss" in given else "target"].detach().requires_grad_()
        tokens = tokens if "host_loss" in given else replace(tokens, target=source)
        inputs = HookInputs(
            tokens, source, None, wanted.bounds, wanted.acts, wanted.layout, wanted.counts_sequences
        )
        result, by_surrogate = corrected(correction, outcome, inputs)
        loss: tuple[Tensor, ...] = ()
        if wanted.acts and _slope_is_weights(correction, given):
            loss = (result.loss.detach(),)
        elif wanted.acts:
            loss = *torch.autograd.grad(result.loss.sum(), source), result.loss.detach()
    finite = as_numbers(result.finite, torch.uint8)
    own = (finite, result.weights, result.ratio, result.clipped, result.rejected, *loss)
    if inputs.layout is None:
        return own
    of = tokens, outcome, inputs.layout, given.get("position"), by_surrogate
    sums, bins = summarize(*of, counts_sequences=wanted.counts_sequences)
    return (*own, *sums, *(x for x in bins[:2] if x is not None), *bins.rows)


def _tokens_of(given: Mapping[str, Tensor]) -> Tokens:
    """The tokens of a graph. Its segments hold tensors instead of lengths."""
    mask = given["mask"].float() != 0
    segments = _GraphSegments((), None, mask)
    blocks = ((mask.shape[0] - 2) // BLOCK, given["mixed"], given["bounds"])
    segments.__dict__.update(blocks=blocks, ids=given["ids"])
    others: Any = {name: given.get(name) for name in ("target", "advantages", "ages", "age_steps")}
    return Tokens(segments, given["proximal"], given["behavior"], **others)


class _GraphSegments(Segments):
    def expand(self, values: Tensor) -> Tensor:
        if values.dtype is torch.bool:
            return self.expand(values.float()) != 0
        index = self.ids.long()
        return torch.gather(worked_out(values), 0, index)  # no negative index, which index_select allows


@torch.library.custom_op("slime_ext::worked_out", mutates_args=())
def worked_out(values: Tensor) -> Tensor:
    """[S] -> the same. An opaque op: keeps the compiler from fusing, and so recomputing, ``values`` once per
    token."""
    return values.clone()


@worked_out.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def _expm1(x: Tensor) -> Tensor:
    """e^x - 1 to full precision: on a CPU Inductor computes e^x and subtracts 1, which near 0 loses most
    digits.

    Where it is used, Taylor's series to the 7th power has a relative error below 1e-8.
    """
    if x.dtype is torch.float64:
        return UNCHANGED
    series = x * (1 / math.factorial(7)) + 1 / math.factorial(6)
    for n in (5, 4, 3, 2, 1):
        series = series * x + 1 / math.factorial(n)
    return torch.where(x.abs() < 0.3, x * series, x.exp() - 1)


def _view(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns flags read as bytes into float32, the only type that Inductor makes of flags without a loop."""
    if x.dtype is torch.bool and dtype is torch.uint8:
        return x.to(torch.float32)
    return UNCHANGED


FOR_INDUCTOR: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.expm1.default: _expm1,
    torch.ops.aten.view.dtype: _view,
}


class _KnownLoss(torch.autograd.Function):
    """A loss computed beforehand, with its slope in the tensor that carries the gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, loss: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


def _made_up(given: Named) -> list[Tensor]:
    """Tensors like the given ones, of sizes that are all different."""
    device = given["mask"].device
    longer = LONGER if device.type == "cuda" else 1
    lengths = (*(longer * length for length in MADE_UP), *(0,) * SPARE)
    whole = Segments.whole(lengths, torch.ones(sum(lengths), device=device))
    known = {"mixed": whole.blocks[1], "bounds": whole.blocks[2], "ids": whole.ids}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("ages", "age_steps", "scale", "group"), (len(lengths),)
    )
    found = []
    for name, values in given.items():
        shape = (values.shape[0], len(lengths)) if name == "table" else shapes.get(name, (sum(lengths),))
        shape = () if name.startswith("number") else shape
        found.append(
            known[name].detach() if name in known else torch.ones(shape, dtype=values.dtype, device=device)
        )
    return found

"""Writes a correction as one function in plain torch, for one response.

Each class of a step, surrogate or term has a writer here that returns its lines. The writers are not in
``core``, because a training process needs none of them. A line may use the function's arguments,
``response``, ``finite``, ``log_ratio``, ``keep``, ``weight``, and every name in ``DEFINITIONS``.

The function has the equations, and it ignores masked tokens and values that are no log-probs. It leaves out
context parallelism, metrics, float32 arithmetic for bfloat16 inputs, and the bound on the product of a loss
and an unbounded weight.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from slime_ext.core.centering import split
from slime_ext.core.correction import Correction
from slime_ext.core.losses import EPS_C, Delightful, DualClip, HostLoss, PpoClip, Reinforce, Sapo
from slime_ext.core.needs import Need, lacking
from slime_ext.core.prefix_steps import PREFIX_STEPS, PrefixBudget, PrefixReject, PrefixReweight
from slime_ext.core.state import Effect, Step
from slime_ext.core.steps import STEPS, Clip, MinPrefixReweight, Reject, Reweight, SignedClip, Truncate, Veto
from slime_ext.core.terms import FAR, ReverseK3, SquaredLogRatio
from slime_ext.errors import ConfigError
from slime_ext.ops.divergences import EDGE, HIGHEST, LOWEST

WIDTH = 100  # columns of the printed text
OFFERS = frozenset({Need.TARGET, Need.ADVANTAGES, Need.MASKS, Need.HEAD})
WHY_NOT = {
    Need.WHOLE_STEP: "needs one number of the whole optimizer step",
    Need.AGES: "reads the age of a sample",
    Need.AGE_STEPS: "reads the age of a sample",
}
ARGUMENTS = {
    "loss": "the policy loss, with grad",
    "behavior": "log-probs under the policy that sampled the tokens, nats",
    "proximal": "log-probs under the trainer's policy before the optimizer step, nats",
    "target": "log-probs under the policy that is being trained, nats, with grad",
    "advantages": "the advantages",
    "mask": "0 where the policy did not sample the token (prompt, tool output)",
    "sampler_head": "[T, K] log-probs of the sampler's likeliest tokens, nats",
    "trainer_head": "[T, K] log-probs of the same tokens under the target policy, nats, with grad",
}
SYMBOLS = {
    "rho": "rho_t = exp({numerator} - behavior)",
    "l": "l = {numerator} - behavior",
    "Pi": "Pi = exp of the sum of {numerator} - behavior over the response",
    "geo": "geo = exp of the mean of {numerator} - behavior over the response",
    "p": "p = exp({numerator}), q = exp(behavior)",
}
# Name -> the lines that define it. A name comes after the names that its lines use.
DEFINITIONS = {
    "n": ["n = response.sum().clamp(min=1)"],
    "t": ["t = response.cumsum(0).clamp(min=1).to(log_ratio.dtype)  # 1 at the first response token"],
    "turn_sum": [
        "# A turn is a run of response tokens. Tokens between turns are 0 in every sum.",
        "turn = (response > torch.cat([response.new_zeros(1), response[:-1]])).cumsum(0)",
        "",
        "def turn_sum(x):",
        "    return log_ratio.new_zeros(len(x) + 1).index_add(0, turn, x.to(log_ratio.dtype))[turn]",
        "",
    ],
    "A": ["A = torch.where(response, advantages, 0)"],
    "tv": ["tv = torch.where(finite, {numerator}.detach().exp() - behavior.exp(), 0).abs()"],
    "p": [
        "# float64, because 1 - p must tell probabilities near 1 apart.",
        "p, q = (torch.where(finite, x, 0).detach().double().exp() for x in ({numerator}, behavior))",
        f"p, q = p.clamp({EDGE}, 1 - {EDGE}), q.clamp({EDGE}, 1 - {EDGE})",
    ],
    "kl_qp": ["kl_qp = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()"],
    "kl_pq": ["kl_pq = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()"],
}
STATISTICS = {  # each is 0 at masked tokens, so sums need no mask
    "ratio": "log_ratio",
    "k1": "(-log_ratio)",
    "k2": "(log_ratio.square() / 2)",
    "k3": "(log_ratio.expm1() - log_ratio)",
    "tv": "tv",
    "binary_kl": "kl_qp",
    "binary_kl_max": "torch.maximum(kl_pq, kl_qp)",
}
WHEN = {
    "negative_advantage": "{a} < 0",
    "positive_advantage": "{a} >= 0",
    "outward": "{a} * {l} > 0",
    "outward_positive": "({a} > 0) & ({l} > 0)",
    "outward_negative": "({a} < 0) & ({l} < 0)",
}
Lines = list[str]


def function_of(name: str, correction: Correction, formula: str) -> str:
    """Returns the source of ``name(...) -> (loss, weight, keep)``, which needs only torch.

    Args:
        name: the function's name.
        formula: the first sentence of its docstring.

    Raises:
        ConfigError: one response is not enough to compute the correction, or a part of it has no writer.
    """
    why_not = obstacle(correction)
    if why_not:
        raise ConfigError(f"{name}: expected a correction of one response in plain torch, got {why_not}")
    lines = _body(correction)
    used = [argument for argument in ARGUMENTS if _uses(lines, argument)]
    if not isinstance(correction.surrogate, HostLoss):
        used.remove("loss")  # it is assigned, not read
    head = f"def {name}({', '.join([*used, *_clip_range(correction.surrogate)])}):"
    body = [*_docstring(formula, used, correction), *lines]
    return "\n".join(["import torch", "", "", head, *(f"    {line}" if line else "" for line in body)])


def obstacle(correction: Correction) -> str | None:
    """Returns the first part that this module cannot write, and where its code is."""
    for i, step in enumerate(correction.steps):
        why = [WHY_NOT[need] for need in lacking(step.needs, OFFERS)]
        why += [] if type(step) in STEP_LINES else ["has no lines here"]
        if why:
            return f"steps[{i}] {_yaml_name(step)}, which {why[0]}: read {_code_of(step)}"
    parts: tuple[Any, ...] = (correction.surrogate, *correction.terms)
    for part in parts:
        if type(part) not in LOSS_LINES | TERM_LINES:
            return f"{type(part).__name__}, which has no lines here: read {_code_of(part)}"
    for need in lacking(correction.needs, OFFERS):
        part = f"group: {correction.group}" if need is Need.GROUPS else need.value
        return f"{part}, which reads the whole optimizer step: read slime_ext/host/step_plan.py"
    is_score = isinstance(correction.surrogate, Reinforce) and correction.numerator == "target"
    if correction.center is not None and not is_score:
        return (
            "center beside another loss than -A log pi_target with weights target / behavior: read "
            "slime_ext/core/centering.py"
        )
    return None


# ---- parts of the function ----


def _body(correction: Correction) -> Lines:
    """Returns the lines of the function after its docstring."""
    numerator = correction.numerator
    of_tokens, of_units = ((), correction.steps) if correction.center is None else split(correction.steps)
    lines = [_start(correction), *_steps(of_units)]
    lines += ["weight = torch.where(keep, weight, 0)"] if correction.center is None else _token_weight()
    if not correction.is_identity:
        lines += LOSS_LINES[type(correction.surrogate)](correction.surrogate)
    if correction.center is not None:
        lines += _centering()
    lines += [line for term in correction.terms for line in TERM_LINES[type(term)](term)]
    first = [
        "response = mask != 0",
        "# -9999.0 or 0.7 is no log-prob. Reject a token without a log-prob, because it has no ratio.",
        f"finite = response & (behavior > {LOWEST}) & (behavior <= {HIGHEST})",
        "# Use where, because a masked token may hold NaN, and NaN times 0 is NaN. Weights have no gradient.",
        f"log_ratio = torch.where(finite, {numerator} - behavior, 0).detach()",
    ]
    nested = [] if correction.center is None else _nested(of_tokens)
    return [*nested, *first, *_definitions(lines, numerator), *lines, "return loss, weight, keep"]


def _start(correction: Correction) -> str:
    """Returns the line that sets ``keep`` before any step."""
    if correction.on_nonfinite == "raise":
        return "assert (finite == response).all(), 'behavior: expected log-probs'; keep = finite"
    if "sequence" in correction.units:
        return "keep = finite & (finite == response).all()  # one token without a ratio rejects the response"
    if "turn" in correction.units:
        return "keep = finite & (turn_sum(response & ~finite) == 0)  # one without a ratio rejects its turn"
    return "keep = finite"


def _definitions(lines: Sequence[str], numerator: str) -> Lines:
    """Returns the lines that define what ``lines`` use, in the order of ``DEFINITIONS``."""
    defined: Lines = []
    for name in reversed(DEFINITIONS):
        if _uses([*defined, *lines], name):
            defined = [line.format(numerator=numerator) for line in DEFINITIONS[name]] + defined
    return defined


def _steps(steps: Sequence[Step]) -> Lines:
    """Returns the lines of the steps, with a step's YAML name after its first line."""
    lines: Lines = []
    if not any(Effect.REWEIGHT in step.effects for step in steps):
        lines.append("weight = torch.ones_like(log_ratio)")
    for step in steps:
        first, *rest = STEP_LINES[type(step)](step)
        lines += [f"{first}  # {_yaml_name(step)}", *rest]
    return lines


def _docstring(formula: str, used: Sequence[str], correction: Correction) -> Lines:
    symbols = [
        text.format(numerator=correction.numerator)
        for symbol, text in SYMBOLS.items()
        if re.search(rf"\b{symbol}(?![a-z0-9])", formula)
    ]
    shape = "the T tokens of one response" if correction.units else "T tokens, of one response or packed"
    return [
        *_wrapped(f'"""{formula}'),
        "",
        *_wrapped("; ".join(symbols)),
        *([""] if symbols else []),
        f"Args, [T] each for {shape}:",
        *(line for name in used for line in _wrapped(f"    {name}: {ARGUMENTS[name]}", "        ")),
        "",
        "Returns:",
        "    the loss; the weight that multiplied it, 0 at rejected tokens; keep, False at rejected tokens",
        '"""',
    ]


def _wrapped(text: str, indent: str = "") -> Lines:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _clip_range(surrogate: Any) -> Lines:
    """Returns arguments with the host's defaults for a clip range that the host decides."""
    defaults = {"eps_low": 0.2, "eps_high": 0.2, "eps_c": EPS_C}
    there = {name: value for name, value in defaults.items() if getattr(surrogate, name, "absent") is None}
    return [f"{name}={value}" for name, value in there.items()]


# ---- steps ----


def _sum(unit: str, values: str) -> str:
    return {"token": values, "turn": f"turn_sum({values})", "sequence": f"{values}.sum()"}[unit]


def _aggregated(unit: str, aggregate: str, values: str) -> str:
    """Returns the sum or mean over the response tokens of a unit."""
    if unit == "token" or aggregate == "sum":
        return _sum(unit, values)
    return f"{_sum(unit, values)} / {'n' if unit == 'sequence' else 'turn_sum(response).clamp(min=1)'}"


def _ratio(level: str) -> str:
    unit, aggregate = ("sequence", "mean") if level == "geometric" else (level, "sum")
    log = _aggregated(unit, aggregate, "log_ratio")
    return f"({log}).exp()" if "/" in log else f"{log}.exp()"


def _reweight(step: Reweight) -> Lines:
    return [f"weight = {_ratio(step.level)}"]


def _min_prefix_reweight(step: MinPrefixReweight) -> Lines:
    return [
        "own = torch.where(response, log_ratio, torch.inf)",
        "lowest = torch.cat([own.new_full((1,), torch.inf), own])[:-1].cummin(0).values  # of earlier tokens",
        "weight = (log_ratio + torch.where(lowest < torch.inf, lowest, 0)).exp()",
    ]


def _signed_clip(step: SignedClip) -> Lines:
    return [
        f"ratio = {_ratio(step.level)}",
        f"negative = ratio.clamp({step.negative_low}, {step.negative_high})",
        f"positive = ratio.clamp({step.positive_low}, {step.positive_high})",
        "weight = torch.where(A < 0, negative, positive)",
    ]


def _truncate(step: Truncate) -> Lines:
    return [f"weight = weight.clamp(max={step.high})"]


def _clip(step: Clip) -> Lines:
    return [f"weight = weight.clamp({step.low}, {step.high})"]


def _reject(step: Reject) -> Lines:
    values = STATISTICS[step.statistic]
    if step.unit != "token" and step.aggregate == "max":
        values = "log_ratio.exp()" if step.statistic == "ratio" else values
        above = _sum(step.unit, f"({values} > {step.high})")
        reached = _sum(step.unit, f"(({values} >= {step.low}) & response)")
        inside = [] if step.high is None else [f"({above} == 0)"]
        inside += [] if step.low is None else [f"({reached} > 0)"]
        return [_rejection(" & ".join(inside), step.when, step.unit)]
    value = _aggregated(step.unit, step.aggregate, values)
    if step.statistic == "ratio":
        value = f"({value}).exp()" if "/" in value else f"{value}.exp()"
    low, high = (None if bound is None else str(bound) for bound in (step.low, step.high))
    return [f"value = {value}", _rejection(_inside(low, high), step.when, step.unit)]


def _inside(low: str | None, high: str | None) -> str:
    ends = {"(value >= {})": low, "(value <= {})": high}
    return " & ".join(text.format(bound) for text, bound in ends.items() if bound is not None)


def _rejection(inside: str, when: str, unit: str) -> str:
    if when == "always":
        return f"keep = keep & {inside}"
    applies = WHEN[when].format(a=_sum(unit, "A"), l=_sum(unit, "log_ratio"))
    whole = f"({inside})" if " & " in inside else inside
    return f"keep = keep & ({whole} | ~({applies}))"


def _veto(step: Veto) -> Lines:
    ends = {"(ratio >= {}).all()": step.low, "(ratio <= {}).all()": step.high}
    inside = " & ".join(text.format(bound) for text, bound in ends.items() if bound is not None)
    return ["ratio = log_ratio.exp()", f"keep = keep & {inside}"]


def _prefix_reweight(step: PrefixReweight) -> Lines:
    value = "log_ratio.cumsum(0)"
    return [f"weight = ({value} / t).exp()" if step.aggregate == "mean" else f"weight = {value}.exp()"]


def _prefix_reject(step: PrefixReject) -> Lines:
    value = f"{STATISTICS[step.statistic]}.cumsum(0)"
    value = f"({value} / t)" if step.aggregate == "mean" else value
    value, grows = (f"{value}.exp()", "** t.sqrt()") if step.statistic == "ratio" else (value, "* t.sqrt()")
    growth = f" {grows}" if step.growth == "sqrt" else ""
    low, high = (None if bound is None else f"{bound}{growth}" for bound in (step.low, step.high))
    return [f"value = {value}", _rejection(_inside(low, high), step.when, "token")]


def _prefix_budget(step: PrefixBudget) -> Lines:
    values = STATISTICS[step.statistic]
    return [
        f"v = 1 - (1 - {step.last}) * (t - 1) / (n - 1).clamp(min=1)",
        f"spent = (v * {values}).cumsum(0)",
        f"granted = {step.high} + {step.budget} * ((v * response).cumsum(0) - v)",
        f"inside = (v * {values} <= {step.high}) & (spent <= granted)",
        _rejection("inside", step.when, "token"),
    ]


STEP_LINES: dict[type, Callable[[Any], Lines]] = {
    Reweight: _reweight,
    MinPrefixReweight: _min_prefix_reweight,
    SignedClip: _signed_clip,
    Truncate: _truncate,
    Clip: _clip,
    Reject: _reject,
    Veto: _veto,
    PrefixReweight: _prefix_reweight,
    PrefixReject: _prefix_reject,
    PrefixBudget: _prefix_budget,
}


# ---- losses and terms ----


def _anchored_ratio(surrogate: PpoClip | DualClip | Sapo) -> str:
    return f"ratio = torch.where(keep, target - {surrogate.anchor}.detach(), 0).exp()"


def _bound(surrogate: Any, name: str) -> str:
    """Returns the number, or the argument's name if the host decides it."""
    value = getattr(surrogate, name)
    return name if value is None else str(value)


def _host(surrogate: HostLoss) -> Lines:
    return ["loss = torch.where(keep, loss, 0) * weight"]


def _reinforce(surrogate: Reinforce) -> Lines:
    return ["loss = -A * torch.where(keep, target, 0) * weight"]


def _ppo_clip(surrogate: PpoClip) -> Lines:
    low, high = (_bound(surrogate, name) for name in ("eps_low", "eps_high"))
    return [
        _anchored_ratio(surrogate),
        f"loss = torch.maximum(-A * ratio, -A * ratio.clamp(1 - {low}, 1 + {high})) * weight",
    ]


def _dual_clip(surrogate: DualClip) -> Lines:
    low, high, floor = (_bound(surrogate, name) for name in ("eps_low", "eps_high", "eps_c"))
    return [
        _anchored_ratio(surrogate),
        f"loss = torch.maximum(-A * ratio, -A * ratio.clamp(1 - {low}, 1 + {high}))",
        f"loss = torch.where(A < 0, torch.minimum(loss, -{floor} * A), loss) * weight",
    ]


def _sapo(surrogate: Sapo) -> Lines:
    return [
        _anchored_ratio(surrogate),
        f"tau = torch.full_like(A, {surrogate.tau_neg}).masked_fill(A > 0, {surrogate.tau_pos})",
        "loss = -A * torch.sigmoid(tau * (ratio - 1)) * 4 / tau * weight",
    ]


def _delightful(surrogate: Delightful) -> Lines:
    return [
        "log_prob = torch.where(keep, target, 0)",
        f"gate = torch.sigmoid(-A * log_prob.detach() / {surrogate.eta})",
        "loss = -gate * A * log_prob * weight",
    ]


def _squared_log_ratio(term: SquaredLogRatio) -> Lines:
    return [
        "drift = torch.where(finite, target - behavior, 0)  # also at rejected tokens",
        f"loss = loss + {term.coefficient} * drift.square()",
    ]


def _reverse_k3(term: ReverseK3) -> Lines:
    return [
        f"drift = torch.where(finite, target - behavior, 0).clamp(min={-FAR})  # also at rejected tokens",
        f"loss = loss + {term.coefficient} * ((-drift).expm1() + drift)",
    ]


LOSS_LINES: dict[type, Callable[[Any], Lines]] = {
    HostLoss: _host,
    Reinforce: _reinforce,
    PpoClip: _ppo_clip,
    DualClip: _dual_clip,
    Sapo: _sapo,
    Delightful: _delightful,
}
TERM_LINES: dict[type, Callable[[Any], Lines]] = {SquaredLogRatio: _squared_log_ratio, ReverseK3: _reverse_k3}


# ---- score centering ----


def _nested(steps: Sequence[Step]) -> Lines:
    """Returns the lines of f, the weight of a token (sampled or in the head)."""
    lines = _steps(steps)
    body = [
        "log_ratio = (target - behavior).detach()",
        "finite = keep = torch.ones_like(log_ratio, dtype=torch.bool)",
        *(line for line in _definitions(lines, "target") if not line.startswith("A = ")),
        *lines,
        "return torch.where(keep, weight, 0), keep",
    ]
    head = "def f(target, behavior, A):  # the weight of a sampled token, or of a token in the head"
    return ["", head, *(f"    {line}" for line in body), ""]


def _token_weight() -> Lines:
    return [
        "m = torch.where(keep, weight, 0)",
        "of_token, inside = f(torch.where(finite, target, 0), torch.where(finite, behavior, 0), A)",
        "keep, weight = keep & inside, m * of_token",
    ]


def _centering() -> Lines:
    # Not at the top: torch.autograd.Function needs torch, and presets are listed without it.
    from slime_ext.ops.centering import ABSENT as NO_LOG_PROB
    from slime_ext.ops.centering import FLOOR

    return [
        f"log_q = torch.where((m > 0)[:, None] & (sampler_head > -torch.inf), sampler_head, {NO_LOG_PROB})",
        f"log_p = torch.where(log_q > {NO_LOG_PROB}, trainer_head, {NO_LOG_PROB})",
        "head_q, head_p = log_q.exp(), log_p.detach().exp()",
        "# The last column is the tail: all tokens outside the head as one token.",
        f"tail_q, tail_p = ((1 - x.sum(1, keepdim=True)).clamp(min={FLOOR}) for x in (head_q, head_p))",
        "log_p_all, log_q_all = (torch.cat(x, 1) for x in ((log_p, tail_p.log()), (log_q, tail_q.log())))",
        "of_head, _ = f(log_p_all, log_q_all, A[:, None])",
        "alpha = tail_q / tail_p * of_head[:, -1:]",
        "loss = loss + A * m * ((head_q * of_head[:, :-1] - alpha * head_p) * log_p).sum(1)",
    ]


# ---- words ----


def _yaml_name(step: Step) -> str:
    named: dict[str, Any] = {**STEPS, **PREFIX_STEPS}
    return next((name for name, cls in named.items() if isinstance(step, cls)), type(step).__name__)


def _code_of(part: Any) -> str:
    """Returns the name of a part's class and file."""
    return f"{type(part).__name__} in {type(part).__module__.replace('.', '/')}.py"


def _uses(lines: Sequence[str], name: str) -> bool:
    """Whether the code of any line, without its comment, contains the name."""
    return any(
        re.search(rf"(?<![\w.]){name}\b", line.partition("  #")[0]) for line in lines if line[:1] != "#"
    )

"""Turns the evidence of a rehearsal into the ten lines of its page. Each line is ok or says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slime_ext.ops.divergences import is_log_prob
from slime_ext.tools.launch.launch import Launch
from slime_ext_cpu.driver import TIMED_OUT
from slime_ext_cpu.rehearsal.evidence import Evidence, nonfinite
from slime_ext_cpu.rehearsal.replace import ROLLOUTS, Sizes, kept, sizes_of, small_sizes

OK, WRONG, NOT_REACHED, NOT_ASKED = "ok", "WRONG", "not reached", "not asked for"
GENERATES = ("--custom-generate-function-path", "--rollout-function-path")
QUOTED = 60  # characters of a sample
PADDED = "outside_vocabulary"  # a random twin also samples the rows that pad its vocabulary
StateAndText = tuple[str, str]  # the state and the text of a line


@dataclass(frozen=True)
class PageLine:
    """One line of the page."""

    name: str
    state: str
    text: str = ""


def lines(launch: Launch, seen: Evidence) -> list[PageLine]:
    """Returns the ten lines. If the run failed, the first line that it did not reach says why."""
    small = small_sizes(sizes_of(launch))
    checked = [PageLine(name, *check(launch, small, seen)) for name, check in CHECKS.items()]
    return _with_cause(checked, launch, seen) if seen.status else checked


def _with_cause(checked: Sequence[PageLine], launch: Launch, seen: Evidence) -> list[PageLine]:
    """Adds what ended the run to the first line without a result.

    If every line has a result, the last line gets it.
    """
    at = next((i for i, line in enumerate(checked) if line.state == NOT_REACHED), len(checked) - 1)
    text = f"no answer for {seen.seconds:.0f} s" if seen.status == TIMED_OUT else _cause(launch, seen)
    return [replace(line, state=WRONG, text=text) if i == at else line for i, line in enumerate(checked)]


def _cause(launch: Launch, seen: Evidence) -> str:
    """Returns the error of a function that a flag names, or else the host's error."""
    if seen.status < 0:
        return seen.cause
    for event in seen.errors():
        flag = next((f for f in launch.flags if event.get("path") in f.values), None)
        if flag is not None:
            return f"{flag.where}: {flag.name} {flag.values[0]}: {event['error']} ({event['at']})"
    return seen.cause


def _script(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    count, program = len(launch.flags), Path(launch.program).name
    return OK, f"{count} flags for {program}, of which {len(list(kept(launch)))} stay as they are"


def _parsed(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    if not seen.parsed:
        return NOT_REACHED, ""
    return OK, f"the host's parser took them: {small}, {seen.parsed['advantage_estimator']}"


def _engine(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    if launch.flag("--debug-train-only"):
        return NOT_ASKED, "--debug-train-only"
    return (OK, "SGLang on the CPU") if seen.calls("engine") else (NOT_REACHED, "")


def _model(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    calls = seen.calls("model")
    if not calls:
        return NOT_REACHED, ""
    return OK, f"{sum(c['parameters'] for c in calls):,} parameters on {len(calls)} ranks"


def _sampled(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    samples = [sample for rollout in seen.rollouts.values() for sample in rollout]
    if not samples:
        return NOT_REACHED, " ".join(seen.unread)
    if wrong := _wrong_log_probs(seen, samples):
        generators = [flag for name in GENERATES if (flag := launch.flag(name))]
        return WRONG, wrong + "".join(f" ({flag.where}: {flag})" for flag in generators)
    one, lengths = samples[0], [sample["response_length"] for sample in samples]
    text = one["response"][:QUOTED] + ("..." if len(one["response"]) > QUOTED else "")
    every = f"{len(samples)} responses in {len(seen.rollouts)} rollouts"
    sizes = f"of {min(lengths)} to {max(lengths)} tokens"
    return OK, f"{every} {sizes}; the first: {text!r} -> reward {one['reward']}"


def _wrong_log_probs(seen: Evidence, samples: Sequence[Mapping[str, Any]]) -> str:
    """Says what the analysis finds wrong in the dumps. Without an analysis, counts invalid log-probs."""
    if seen.analysis:
        wrong = (f for f in seen.analysis.findings if f.severity == "error" and f.name != PADDED)
        return " ".join(f"{f.title} {f.evidence}" for f in wrong)
    lists = [sample.get("rollout_log_probs") for sample in samples]
    absent = sum(log_probs is None for log_probs in lists)
    spoilt = sum(not is_log_prob(torch.tensor(log_probs).double()).all() for log_probs in lists if log_probs)
    if not absent + spoilt or (absent == len(lists) and not seen.asks_for_log_probs):
        return ""
    return (
        f"Of {len(lists)} responses, {absent} have no log-probs of the sampler, and {spoilt} have values "
        "that are not log-probs, such as NaN."
    )


def _hook(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    hook = seen.hook()
    if not hook.calls:
        if seen.parsed and not seen.asks_for_log_probs:
            return NOT_ASKED, "neither --use-tis nor --get-mismatch-metrics"
        return (WRONG, "never, although there were steps") if seen.calls("step") else (NOT_REACHED, "")
    if hook.lacking:
        return WRONG, f"without log-probs of the sampler or the trainer in {hook.lacking} calls"
    if hook.nonfinite:
        return WRONG, f"{hook}: {hook.nonfinite} log-ratios are NaN or infinite"
    return OK, f"{hook}; {len(hook.metrics)} metrics: {', '.join(hook.metrics[:4])}"


def _trained(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    places = {(e["rollout"], e["step"]): e for e in seen.calls("step") if e["losses"]}
    if not places:
        return NOT_REACHED, ""
    for (rollout, step), e in places.items():
        if isinstance(e["norm"], str) or "nan" in map(str, e["losses"].values()):
            return WRONG, f"rollout {rollout}, step {step}: loss or gradient norm is not finite"
    expected = small.steps * ROLLOUTS
    if len(places) != expected and not seen.status:
        return WRONG, f"{len(places)} optimizer steps, expected {expected}"
    steps = list(places.values())[:4]
    norms = ", ".join(f"{e['norm']:.3g}" for e in steps if e["norm"] is not None)
    losses = ", ".join(f"{e['losses'].get('loss', 0):.3g}" for e in steps)
    return OK, f"{len(places)} optimizer steps; loss {losses}; gradient norm {norms}"


def _metrics(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    if not seen.scalars:
        return NOT_REACHED, ""
    if names := nonfinite(seen.scalars):
        return WRONG, f"not finite: {', '.join(names[:4])}"
    ours = [name for name in seen.scalars if "off_policy" in name]
    return OK, f"{len(seen.scalars)} names, {len(ours)} of them off_policy"


def _pushed(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    if launch.flag("--debug-train-only"):
        return NOT_ASKED, "--debug-train-only"
    pushes = seen.pushes()
    if not pushes.versions or len(pushes.sampled) < ROLLOUTS:
        return NOT_REACHED, ""
    if len(pushes.versions) >= ROLLOUTS and (launch.asynchronous or pushes.arrived):
        return OK, str(pushes)
    flag = launch.flag("--update-weights-interval") or launch.flag("--debug-skip-weight-update")
    blamed = f" ({flag.where}: {flag})" if flag else ""
    return WRONG, f"the engine keeps its weights: {pushes}{blamed}"


def _checkpoint(launch: Launch, small: Sizes, seen: Evidence) -> StateAndText:
    if not seen.checkpoint:
        return NOT_REACHED, ""
    return OK, f"{len(seen.checkpoint)} files, {sum(seen.checkpoint.values()) / 2**20:.1f} MiB"


CHECKS: dict[str, Callable[[Launch, Sizes, Evidence], StateAndText]] = {
    "script": _script,
    "parsed": _parsed,
    "engine up": _engine,
    "model built": _model,
    "sampled": _sampled,
    "hook called": _hook,
    "trained": _trained,
    "metrics logged": _metrics,
    "weights pushed": _pushed,
    "checkpoint written": _checkpoint,
}


def unseen(launch: Launch, account: Mapping[str, str]) -> list[str]:
    """Returns what a rehearsal without a GPU cannot show about this launch."""
    hidden = [
        "memory, speed, NCCL, and the numerics of CUDA kernels",
        "the model's own weights and their conversion",
    ]
    if "; without " in account.get("model", ""):
        hidden.append(account["model"].split("; without ")[1].split(";")[0])
    if "not on this machine" in account.get("data", ""):
        hidden.append("the rows of --prompt-data: keys, lengths, labels")
    if "of bytes" in account.get("model", ""):
        hidden.append("the model's tokenizer and chat template")
    if launch.flag("--colocate"):
        hidden.append("offloading and the push of colocated weights")
    return [*hidden, *(f"{name}: {account[name]}" for name in ("filter", "evaluation") if name in account)]

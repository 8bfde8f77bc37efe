"""What a host's own loss gives in every layout, hooked, patched and only watched; as a table, door by door.

    HOSTS=path/to/hosts python -m tests.downstream.layouts [--out FOLDER] [DIR ...]

DIR is a checkout called slime-RELEASE or miles-RELEASE; without one, the wheel and those of HOSTS. A host
that has a line in FOLDER/rows.jsonl is not run again.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lines import complete, read
from slime_ext.hosts.code import LOSS, TARGET
from slime_ext.tools.convert import read as read_block
from tests.downstream.checkouts import Checkout, apply_patch, checkouts, copied, patch_of
from tests.downstream.host_loss import Case, Layout, loaded, measure
from tests.downstream.host_step import two_steps
from tests.ranks import run_ranks
from tests.tools.convert.oracle_slime_mis import EXAMPLE as MIS

BAND = {"low": 0.9, "high": 1.1}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"preset": "token_tis"},
    "sequence": {"preset": "seq_is"},
    "geometric, veto": {
        "steps": [
            {"reject": {"unit": "sequence", "statistic": "ratio", "aggregate": "mean", **BAND}},
            {"veto": {"low": 0.55}},
            {"reweight": {"level": "token"}},
            {"truncate": {"high": 2.0}},
        ]
    },
    "turn": {"preset": "turn_tis"},
    "pure IS": {"preset": "pure_is"},
    "off_policy_is": {"preset": "off_policy_is"},
    "sequence rejection, masks all": {
        "mask_scope": "all",
        "steps": [{"reject": {"unit": "sequence", "aggregate": "sum", "low": 0.5, "high": 2.0}}],
    },
}
PER_TOKEN, RECOMPUTED = {"calculate_per_token_loss": True}, {"recompute_loss_function": True}
LAYOUTS = {
    "1 process": Layout(),
    "CP2": Layout(cp=2),
    "TP2": Layout(tp=2),
    "TP2 x CP2": Layout(tp=2, cp=2),
    "DP2": Layout(dp=2),
    "PP2": Layout(pp=2),
    # A power of two: up to v0.3.0 gradients come from Megatron's fused cross entropy, in bfloat16, after
    # slime has scaled the loss by the number of micro-batches.
    "2 micro-batches": Layout(micro_batches=2),
    "allgather-CP": Layout(cp=2, flags={"allgather_cp": True}),
    "CP2, bshd": Layout(cp=2, flags={"qkv_format": "bshd"}),
    "recompute": Layout(flags=RECOMPUTED),
    "CP2, recompute": Layout(cp=2, flags=RECOMPUTED),
    "per token": Layout(flags=PER_TOKEN),
    "per token, CP2": Layout(cp=2, flags=PER_TOKEN),
    "per token, TP2 x CP2": Layout(tp=2, cp=2, flags=PER_TOKEN),
    "per token, DP2": Layout(dp=2, flags=PER_TOKEN),
}
Job = tuple[Layout, list[Case]]
Measured = Mapping[str, list[dict[str, Any]]]
BOUND = 1e-6  # float32, sums of about 40 terms of size 1 in an order that the layout decides
TIMEOUT_S = 1200.0
# What a release does not have yet, by a word that its loss lacks.
NEEDS = {"allgather-CP": "allgather_cp", "recompute": "recompute_loss_function", "bshd": '"bshd"'}
OURS = "slime_ext.host.init"
# What couples samples.
PLANNED = {"get_mismatch_metrics": True}
STEPS = [
    "reweight",
    {"truncate": {"high": 1.2}},
    "normalize",
    {"reject": {"low": 0.7, "high": 1.6}},
    {"reject": {"unit": "sequence", "aggregate": "mean", "low": 0.9, "high": 1.15}},
]
COUPLED = {
    "normalize": {"steps": STEPS[:3]},
    "second moment": {"steps": [{"second_moment": {"threshold": 0.04}}]},
    "kept": {"steps": STEPS, "denominator": "kept"},
    "kept, masks all": {"steps": STEPS, "denominator": "kept", "mask_scope": "all"},
    "atomic": {"steps": STEPS, "group": "atomic"},
    "atomic, kept": {"steps": STEPS, "denominator": "kept", "group": "atomic"},
}
COUPLED_LAYOUTS = {
    "1 process": Layout(),
    "per token": Layout(flags=PER_TOKEN),
    "2 micro-batches": Layout(micro_batches=2),
    "4 micro-batches, backwards": Layout(micro_batches=4, backwards=True),
    "CP2": Layout(cp=2),
    "TP2": Layout(tp=2),
    "DP2": Layout(dp=2),
    "DP2 x CP2": Layout(dp=2, cp=2),
    "PP2": Layout(pp=2),
    "VPP2": Layout(pp=2, vpp=2, micro_batches=2),
    "DP2, 2 micro-batches": Layout(dp=2, micro_batches=2),
    "recompute": Layout(micro_batches=2, flags=RECOMPUTED),
    "per token, DP2": Layout(dp=2, flags=PER_TOKEN),
    "per token, CP2": Layout(cp=2, flags=PER_TOKEN),
}
ITS_EXAMPLE = "examples.train_infer_mismatch_helper.mis"
ICEPOP_LOW = 0.5
GEOMETRIC = {"unit": "sequence", "aggregate": "mean", **BAND}


def _hook(name: str | None, **flags: Any) -> dict[str, Any]:
    return {"custom_tis_function_path": name and f"slime_ext.tis.{name}", **flags}


# Hooks and losses that each host computes itself; of losses that a release lacks the word that it lacks.
VARIANTS = {
    "host's own": Case(flags=_hook(None), init=None),
    "vanilla": Case(flags=_hook("vanilla_tis_function"), init=None),
    "token_tis": Case(flags=_hook("token_tis"), init=None),
    "icepop": Case(flags=_hook("icepop_function", tis_clip_low=ICEPOP_LOW), init=None),
    "geometric": Case({"steps": [{"reject": GEOMETRIC}], "mask_scope": "all"}, init=None),
    "none": Case(flags=_hook(None, use_tis=False), init=None),
    "metrics only": Case(flags=_hook("metrics_only", use_tis=False, get_mismatch_metrics=True), init=None),
    "gspo": Case(flags=_hook("token_tis", advantage_estimator="gspo"), init=None),
    "cispo": Case(flags=_hook("token_tis", advantage_estimator="cispo"), init=None),
    "dual clip": Case(flags=_hook("token_tis", eps_clip_c=1.02), init=None),
    "per token": Case(flags=_hook("token_tis", **PER_TOKEN), init=None),
    "bypass": Case(flags=_hook(None, use_tis=False, use_rollout_logprobs=True), init=None),
    "recompute": Case(flags=_hook("token_tis", recompute_loss_function=True), init=None),
}
VARIANT_LAYOUTS = {"1 process": Layout(), "CP2": Layout(cp=2), "TP2": Layout(tp=2)}
LATER = {"cispo": "compute_cispo_loss", "dual clip": 'args.eps_clip_c|"eps_clip_c"'} | NEEDS


def variants_of(checkout: Checkout) -> dict[str, Case]:
    """The variants that this host has."""
    source = source_of(checkout)
    lacking = {name for name, word in LATER.items() if not re.search(word, source)}
    return {name: case for name, case in VARIANTS.items() if name not in lacking}


def source_of(checkout: Checkout) -> str:
    """The text of the modules that this release's policy loss is spread over."""
    named = ("loss_function", LOSS, TARGET, "compute_log_probs", "compute_policy_loss")
    rooms = {found.module for name in named if (found := checkout.tree.defining(name))}
    return "".join(map(checkout.module, sorted(rooms)))


def layouts_of(checkout: Checkout) -> dict[str, Layout]:
    """The layouts that this host has."""
    source = source_of(checkout)
    lacking = [layout for layout, word in NEEDS.items() if word not in source]
    return {key: value for key, value in LAYOUTS.items() if not any(word in key for word in lacking)}


def run_all(checkout: Checkout, jobs: Mapping[str, Job]) -> dict[str, list[dict[str, Any]]]:
    """What every job measured, by its name: one launch of ranks for all layouts of the same shape."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for key, (layout, _) in jobs.items():
        shapes.setdefault(layout.shape, []).append(key)
    found: dict[str, list[dict[str, Any]]] = {}
    for keys in shapes.values():
        which, given = (checkout.name, str(checkout.folder)), [jobs[key] for key in keys]
        load = functools.partial(loaded, *which)
        answers = run_ranks(measure, jobs[keys[0]][0].ranks, *which, given, timeout=TIMEOUT_S, before=load)
        found |= zip(keys, next(answer for answer in answers if answer), strict=True)
    return found


def others(checkout: Checkout) -> dict[str, dict[str, Any]]:
    """What corrects beside ``init``, which then only measures: nothing of ours is called."""
    own, source = _hook(None), source_of(checkout)
    found = {
        "nothing": _hook(None, use_tis=False),
        "the host's own": own,
        "a hook of one's own": own | {"custom_tis_function_path": "tests.downstream.layouts.halving"},
    }
    if icepop := checkout.tree.defining("icepop_function"):
        path = f"{icepop.module}.icepop_function"
        found["its icepop"] = own | {"custom_tis_function_path": path, "tis_clip_low": ICEPOP_LOW}
    if NEEDS["recompute"] in source:
        found["recompute"] = own | RECOMPUTED
    if "use_score_centering" in source:
        centred = {"use_score_centering": True, "score_centering_top_k": 4}
        found["score centering"] = _hook(None, use_tis=False) | centred
        found["score centering, its own TIS"] = own | centred
    return found


def halving(args: Any, *, pg_loss: Any, loss_masks: Any, **kwargs: Any) -> Any:
    """A hook of a user's own."""
    return pg_loss / 2, loss_masks, {}


def beside(checkout: Checkout) -> list[Case]:
    """Our hook that only measures, then each of ``others`` without ``init`` and with it."""
    hook = Case(None, _hook("metrics_only", use_tis=False, get_mismatch_metrics=True))
    return [hook, *(Case(None, f, init=init) for f in others(checkout).values() for init in (None, OURS))]


NO_HOOK = Case(flags=_hook(None, use_tis=False), init=None)
MEASURED_ONLY = ("token_tis", "geo_rs", "off_policy_is")  # presets, under --get-mismatch-metrics alone
HOOKS = ("correct", "vanilla_tis_function", "icepop_function", "off_policy_is_function")
NANS = (None, ("behavior", "masked"), ("behavior", "valid"))


def with_nan(hook: str) -> list[Case]:
    """One hook on log-probs without NaN, with one at a masked and one at a valid token."""
    flags = {"custom_tis_function_path": f"slime_ext.tis.{hook}", "tis_clip_low": 0.2}
    return [Case({"preset": "token_tis"} if hook == "correct" else None, flags, nan) for nan in NANS]


def in_each(name: str, layouts: Mapping[str, Layout], given: list[Case]) -> dict[str, Job]:
    """The same cases in several layouts."""
    return {f"{name}, {key}": (layout, given) for key, layout in layouts.items()}


def jobs_of_doors(checkout: Checkout) -> dict[str, Job]:
    """What DOORS reads."""
    jobs = in_each("corrections", layouts_of(checkout), [Case(mapping) for mapping in CORRECTIONS.values()])
    jobs |= in_each("coupled", COUPLED_LAYOUTS, [Case(mapping, PLANNED) for mapping in COUPLED.values()])
    return jobs | in_each("beside", VARIANT_LAYOUTS, beside(checkout))


def every_job(checkout: Checkout) -> dict[str, Job]:
    """All that the tests hold against each other, so that a shape of ranks is started once for a host."""
    off, nan = {"use_tis": False, "get_mismatch_metrics": True}, ("proximal", "valid")
    pair = {"1 process": Layout(), "CP2": Layout(cp=2)}
    jobs = jobs_of_doors(checkout) | in_each("no hook", pair, [NO_HOOK])
    jobs["metrics alone"] = (Layout(cp=2), [Case({"preset": name}, off) for name in MEASURED_ONLY])
    for hook in HOOKS:
        jobs |= in_each(f"nan, {hook}", pair, with_nan(hook))
    jobs["nan of the proximal policy"] = (Layout(), [Case({"preset": "token_tis"}, nan=nan)])
    jobs["without init"] = (Layout(), [Case({"preset": "off_policy_is"}, init=None)])
    jobs |= in_each("variants", VARIANT_LAYOUTS, list(variants_of(checkout).values()))
    if "step_global_batch_size" in source_of(checkout) and checkout.module(ITS_EXAMPLE):
        theirs = {**MIS, "custom_tis_function_path": f"{ITS_EXAMPLE}.compute_mis_weights_with_cp"}
        ours = read_block("slime_mis", {"use_tis": True, **MIS}).mapping
        both = [Case(None, theirs, init=None), Case(ours, PLANNED)]
        jobs |= in_each("mis.py", {"1": Layout(), "2": Layout(micro_batches=2)}, both)
    jobs["coupled alone"] = (Layout(), [Case({"steps": s}) for s in (STEPS[:2], STEPS[:2] + STEPS[3:])])
    return jobs


def measured_on(checkout: Checkout, jobs: Mapping[str, Job]) -> dict[str, list[dict[str, Any]]]:
    """What jobs gave, and two steps of the host's own ``train``."""
    steps = run_ranks(two_steps, 1, checkout.name, str(checkout.folder), timeout=TIMEOUT_S)
    return {"two steps": steps} | run_all(checkout, jobs)


def measured_patched(checkout: Checkout, into: Path) -> dict[str, list[dict[str, Any]]]:
    """Every correction on a patched copy, which passes the target's log-probs itself."""
    copy = Checkout(checkout.name, checkout.release, copied(checkout, into))
    apply_patch(checkout.folder, copy.folder)
    inits = {"patched, without init": None, "patched, with init": OURS}
    given = {key: [Case(one, init=init) for one in CORRECTIONS.values()] for key, init in inits.items()}
    return run_all(copy, {key: (Layout(cp=2), cases) for key, cases in given.items()})


def distance(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Largest difference of losses and gradient norms, relative where they are above 1."""
    pairs = [(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in ("loss", "gradient")]
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)


def apart(measured: Measured, name: str, cases: slice = slice(None)) -> dict[str, float]:
    """How far every layout of ``name`` is from one process."""
    keys = [key.removeprefix(f"{name}, ") for key in measured if key.startswith(f"{name}, ")]
    found = {key: measured[f"{name}, {key}"][cases] for key in keys}
    alone = {key: "per token" if "per token" in key else "1 process" for key in keys}
    return {key: distance(found[alone[key]], found[key]) for key in keys if key != alone[key]}


def unseen(measured: Measured) -> float:
    """Largest relative difference of a metric beside what else corrects from our hook's; infinite where a
    loss, a gradient or a metric of the host's is not bitwise what it is without ``init``."""
    worst = 0.0
    for hook, *cases in (measured[f"beside, {key}"] for key in VARIANT_LAYOUTS):
        for alone, seen in zip(cases[::2], cases[1::2], strict=True):
            if any(alone[key] != seen[key] for key in ("loss", "gradient", "metrics")):
                return math.inf
            pairs = [(value, seen["ours"].get(key, math.inf)) for key, value in hook["ours"].items()]
            worst = max(worst, *(abs(a - b) / max(1.0, abs(a)) for a, b in pairs))
    return worst


def _knows_ages(measured: Measured) -> bool:
    """Of samples whose versions only ``log_rollout`` tells, one version old."""
    logged = [values for _, values in measured["two steps"][0]["logged"]]
    names = ("train/off_policy/staleness_mean", "train/off_policy/staleness_known_fraction")
    return bool(logged) and all(values[name] == 1.0 for values in logged for name in names)


_TARGET = list(CORRECTIONS).index("off_policy_is")
# Door -> the largest difference of what must be equal, or whether it is there.
DOORS: dict[str, Callable[[Measured], float | bool]] = {
    "hook": lambda m: max(apart(m, "corrections").values()),
    "target": lambda m: max(apart(m, "corrections", slice(_TARGET, _TARGET + 1)).values()),
    "metrics without hook": unseen,
    "plan": lambda m: max(apart(m, "coupled").values()),
    "ages": _knows_ages,
    "certificate": lambda m: "slime_ext: certificate, weights " in m["two steps"][0]["said"],
    "guards": lambda m: m["two steps"][0]["gave_up"],
}


def fits(found: float | bool) -> bool:
    """Whether a door is as it should be."""
    return found if isinstance(found, bool) else found < BOUND


def row(checkout: Checkout) -> dict[str, Any]:
    """What the tables say of a host."""
    measured = measured_on(checkout, jobs_of_doors(checkout))
    alone, layouts = measured["corrections, 1 process"], apart(measured, "corrections")
    if patch_of(checkout.folder).is_file():
        with tempfile.TemporaryDirectory() as place:
            there = measured_patched(checkout, Path(place))
        layouts |= {key: distance(alone, found) for key, found in there.items()}
    figures = [f"{one['loss']:.6f} / {one['gradient']:.6f}" for one in alone]
    doors = {name: look(measured) for name, look in DOORS.items()}
    return {"host": f"{checkout}", "doors": doors, "figures": figures, "layouts": layouts}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the doors of every host; loss and gradient norm of every correction; the layouts."""
    keys = dict.fromkeys(key for row in rows for key in row["layouts"])
    parts = (
        [list(DOORS), *([_shown(row["doors"].get(name)) for name in DOORS] for row in rows)],
        [list(CORRECTIONS), *(row["figures"] for row in rows)],
        [list(keys), *([_shown(row["layouts"].get(key)) for key in keys] for row in rows)],
    )
    names = ["host", *(row["host"] for row in rows)]
    return "\n\n".join(_markdown([[n, *line] for n, line in zip(names, part, strict=True)]) for part in parts)


def _shown(found: float | bool | None) -> str:
    if found is None:
        return "-"
    return ("yes" if isinstance(found, bool) else f"{found:.0e}") if fits(found) else f"NO ({found})"


def _markdown(lines: list[list[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])


def main() -> int:
    """Runs what has no line yet, and prints the tables; 1 where a door does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("runs/layouts"))
    given = parser.parse_args()
    asked = [Checkout.at(folder) for folder in given.folders] or checkouts()
    file = given.out / "rows.jsonl"
    complete(file, "host", {f"{one}": lambda one=one: row(one) for one in asked})
    rows = list(read(file, "host").values())
    print(table(rows))
    return int(not all(fits(found) for row in rows for found in row["doors"].values()))


if __name__ == "__main__":
    raise SystemExit(main())

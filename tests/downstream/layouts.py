"""The same loss and gradient in every layout of a real host, hooked and patched: measured, as a table.

``python -m tests.downstream.layouts --slime-dir DIR``, and again for further checkouts; ``--miles-dir DIR``.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from slime_ext.host import hosts
from tests.downstream.checkouts import Checkout, apply_patch
from tests.downstream.host_loss import Case, Layout, measure
from tests.ranks import run_ranks

CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {"preset": "token_tis"},
    "sequence": {"preset": "seq_is"},
    "geometric, veto": {
        "steps": [
            {
                "reject": {
                    "unit": "sequence",
                    "statistic": "ratio",
                    "aggregate": "mean",
                    "low": 0.9,
                    "high": 1.1,
                }
            },
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
PER_TOKEN = {"calculate_per_token_loss": True}
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
    "recompute": Layout(flags={"recompute_loss_function": True}),
    "CP2, recompute": Layout(cp=2, flags={"recompute_loss_function": True}),
}
PER_TOKEN_LAYOUTS = {
    "per token": Layout(flags=PER_TOKEN),
    "per token, CP2": Layout(cp=2, flags=PER_TOKEN),
    "per token, TP2 x CP2": Layout(tp=2, cp=2, flags=PER_TOKEN),
    "per token, DP2": Layout(dp=2, flags=PER_TOKEN),
}
Job = tuple[Layout, list[Case]]
TIMEOUT_S = 600.0
# Beside the modules that may define it, where its parts are.
MORE = ("slime.utils.ppo_utils", "miles.utils.ppo_utils")
# What a release does not have yet, by a word that its loss lacks.
NEEDS = {"allgather-CP": "allgather_cp", "recompute": "recompute_loss_function", "bshd": '"bshd"'}


def source_of(checkout: Checkout) -> str:
    """The text of the modules that this release's policy loss is spread over."""
    named = ("loss_function", hosts.LOSS, hosts.TARGET)
    rooms = {found.module for name in named if (found := checkout.tree.defining(name))}
    return "".join(map(checkout.module, (*sorted(rooms), *MORE)))


def layouts_of(name: str, folder: Path) -> dict[str, Layout]:
    """The layouts that this host has."""
    source = source_of(Checkout(name, "", folder))
    lacking = [layout for layout, word in NEEDS.items() if word not in source]
    return {key: value for key, value in LAYOUTS.items() if not any(word in key for word in lacking)}


def run_all(name: str, folder: Path, jobs: dict[str, Job]) -> dict[str, list[dict[str, Any]]]:
    """What every job measured, by its name: one launch of ranks for all layouts of the same shape."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for key, (layout, _) in jobs.items():
        shapes.setdefault(layout.shape, []).append(key)
    found: dict[str, list[dict[str, Any]]] = {}
    for shape, keys in shapes.items():
        given = (name, str(folder), [jobs[key] for key in keys])
        answers = run_ranks(measure, math.prod(shape), *given, timeout=TIMEOUT_S)
        found |= zip(keys, next(answer for answer in answers if answer), strict=True)
    return found


def cases(init: str | None = "slime_ext.host.init") -> list[Case]:
    """One for each correction."""
    return [Case(mapping, init=init) for mapping in CORRECTIONS.values()]


def distance(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Largest difference of losses and gradient norms, relative where they are above 1."""
    pairs = [(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in ("loss", "gradient")]
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)


def patched(name: str, folder: Path, into: Path) -> Path:
    """A copy of the host's package with our patch."""
    shutil.copytree(folder / name, into / name, ignore=shutil.ignore_patterns("__pycache__"))
    apply_patch(folder, into)
    return into


def jobs_of(name: str, folder: Path) -> dict[str, Job]:
    """Every correction in every layout that this host has."""
    return {key: (one, cases()) for key, one in {**layouts_of(name, folder), **PER_TOKEN_LAYOUTS}.items()}


def apart(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """How far every layout of ``jobs_of`` is from one process."""
    return {
        key: distance(found["per token" if "per token" in key else "1 process"], found[key]) for key in found
    }


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
    "CP2": Layout(cp=2),
    "TP2": Layout(tp=2),
    "DP2": Layout(dp=2),
    "DP2 x CP2": Layout(dp=2, cp=2),
    "PP2": Layout(pp=2),
    "DP2, 2 micro-batches": Layout(dp=2, micro_batches=2),
    "recompute": Layout(micro_batches=2, flags={"recompute_loss_function": True}),
    "per token, DP2": Layout(dp=2, flags=PER_TOKEN),
    "per token, CP2": Layout(cp=2, flags=PER_TOKEN),
}
GEOMETRIC_BAND, ICEPOP_LOW = (0.9, 1.1), 0.5
GEOMETRIC = {"unit": "sequence", "aggregate": "mean", "low": GEOMETRIC_BAND[0], "high": GEOMETRIC_BAND[1]}


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


# What corrects beside ``init``, which then only measures: nothing of ours is called.
OTHERS = {
    "nothing": _hook(None, use_tis=False),
    "the host's own": _hook(None),
    "a hook of one's own": _hook(None) | {"custom_tis_function_path": f"{__name__}.halving"},
    "recompute": _hook(None, recompute_loss_function=True),
}


def halving(args: Any, *, pg_loss: Any, loss_masks: Any, **kwargs: Any) -> Any:
    """A hook of a user's own."""
    return pg_loss / 2, loss_masks, {}


def beside(checkout: Checkout) -> list[Case]:
    """Each of OTHERS without ``init`` and with it."""
    cases = [(flags, init) for flags in OTHERS.values() for init in (None, "slime_ext.host.init")]
    has_recompute = NEEDS["recompute"] in source_of(checkout)
    return [
        Case(None, f, init=init) for f, init in cases if has_recompute or "recompute_loss_function" not in f
    ]


NO_HOOK = Case(flags={"use_tis": False, "custom_tis_function_path": None}, init=None)
MEASURED_ONLY = ("token_tis", "geo_rs", "off_policy_is")  # presets, under --get-mismatch-metrics alone
HOOKS = ("correct", "vanilla_tis_function", "icepop_function", "off_policy_is_function")
NANS = (None, ("behavior", "masked"), ("behavior", "valid"))


def with_nan(hook: str) -> list[Case]:
    """One hook on log-probs without NaN, with one at a masked and one at a valid token."""
    flags = {"custom_tis_function_path": f"slime_ext.tis.{hook}", "tis_clip_low": 0.2}
    return [Case({"preset": "token_tis"} if hook == "correct" else None, flags, nan) for nan in NANS]


def every_job(checkout: Checkout) -> dict[str, Job]:
    """All that the tests hold against each other, so that a shape of ranks is started once for a host."""
    jobs = jobs_of(checkout.name, checkout.folder)
    jobs["no hook"] = (Layout(), [NO_HOOK])
    off = {"use_tis": False, "get_mismatch_metrics": True}
    jobs["metrics alone"] = (Layout(cp=2), [Case({"preset": name}, off) for name in MEASURED_ONLY])
    jobs["no hook, CP2"] = (Layout(cp=2), [NO_HOOK])
    for hook in HOOKS:
        jobs |= {
            f"nan, {hook}": (Layout(), with_nan(hook)),
            f"nan, {hook}, CP2": (Layout(cp=2), with_nan(hook)),
        }
    jobs["nan of the proximal policy"] = (
        Layout(),
        [Case({"preset": "token_tis"}, nan=("proximal", "valid"))],
    )
    jobs["without init"] = (Layout(), [Case({"preset": "off_policy_is"}, init=None)])
    variants = list(variants_of(checkout).values())
    jobs |= {f"variants, {key}": (layout, variants) for key, layout in VARIANT_LAYOUTS.items()}
    given = [Case(mapping, PLANNED) for mapping in COUPLED.values()]
    jobs |= {f"coupled, {key}": (layout, given) for key, layout in COUPLED_LAYOUTS.items()}
    jobs["coupled, plain"] = (Layout(), [Case({"steps": s}) for s in (STEPS[:2], STEPS[:2] + STEPS[3:])])
    jobs |= {f"beside, {key}": (layout, beside(checkout)) for key, layout in VARIANT_LAYOUTS.items()}
    return jobs


def patched_jobs() -> dict[str, Job]:
    """Every correction on a patched host, which passes the target's log-probs itself."""
    inits = {"patched, without init": None, "patched, with init": "slime_ext.host.init"}
    return {key: (Layout(cp=2), cases(init)) for key, init in inits.items()}


def row(name: str, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The figures on one process, and how far every layout and the patched host are from them."""
    found = run_all(name, folder, jobs_of(name, folder))
    with tempfile.TemporaryDirectory() as place:
        there = run_all(name, patched(name, folder, Path(place)), patched_jobs())
    alone = found["1 process"]
    return alone, apart(found) | {key: distance(alone, there[key]) for key in there}


def table(rows: dict[str, tuple[list[dict[str, Any]], dict[str, float]]]) -> str:
    """Markdown: loss and gradient norm of every correction, then the distances."""
    lines = [f"| host | {' | '.join(CORRECTIONS)} |", "|---" * (len(CORRECTIONS) + 1) + "|"]
    for host, (alone, _) in rows.items():
        figures = " | ".join(f"{one['loss']:.6f} / {one['gradient']:.6f}" for one in alone)
        lines.append(f"| {host} | {figures} |")
    keys = list(dict.fromkeys(key for _, apart in rows.values() for key in apart if key != "1 process"))
    lines += ["", f"| layout | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]
    for key in keys:
        figures = " | ".join(f"{apart[key]:.0e}" if key in apart else "-" for _, apart in rows.values())
        lines.append(f"| {key} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Prints the table for the checkouts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--slime-dir", action="append", default=[], type=Path)
    parser.add_argument("--miles-dir", action="append", default=[], type=Path)
    args = parser.parse_args()
    named = [("slime", d) for d in args.slime_dir] + [("miles", d) for d in args.miles_dir]
    if not named:
        print("skipped: no --slime-dir and no --miles-dir")
        return
    print(table({folder.resolve().name: row(name, folder.resolve()) for name, folder in named}))


if __name__ == "__main__":
    main()

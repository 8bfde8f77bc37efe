"""Turns what the rules say of a launch into what ``check`` prints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_ext.config import load as config
from slime_ext.config.foreign import FOREIGN
from slime_ext.config.words import brief, one_line
from slime_ext.errors import cut
from slime_ext.hosts import contract
from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import ARGUMENTS
from slime_ext.rules.configuration import BOUNDS
from slime_ext.rules.judge import Verdict
from slime_ext.rules.rule import Line
from slime_ext.rules.setup import Setup, UnknownError
from slime_ext.tools import decision
from slime_ext.tools.check.lines import judged
from slime_ext.tools.check.setup import DESTS, OFFERED, Case, Use, case_of
from slime_ext.tools.launch.launch import Launch, Unread, WrittenFlag
from slime_ext.tools.launch.sources import Sources
from slime_ext.tools.wording import needs

ADDS = {  # what the flags of an offer do
    "first": "measures the mismatch only; applies no correction",
    "then": "policy loss times min(proximal / behavior, 2); slime-ext presets lists other corrections",
}


@dataclass(frozen=True)
class Offer:
    """The flags that add slime_ext to a launch, without those that it has already.

    Args:
        comments: what the flags do, and what they replace.
    """

    flags: tuple[str, ...]
    comments: tuple[str, ...]

    def __str__(self) -> str:
        return "\n# ".join(["\n".join(self.flags), *self.comments])


@dataclass(frozen=True)
class Answer:
    """The result of ``check`` for one file.

    Args:
        rows: name -> what the file resolves to.
        offers: ``first`` or ``then`` -> what adds slime_ext to a launch without it.
        line: the same on one line.
        notes: warnings and hints.
        uses_ours: whether anything of slime_ext would run.
        unread: arguments that are known only where the script runs, one line each.
        skipped: the rules that read such an argument and so were not checked, one line each.
        unasked: what was not checked because the host's code is not here, one line each.
    """

    rows: Mapping[str, str]
    line: str
    notes: tuple[Line, ...] = ()
    uses_ours: bool = True
    unread: tuple[str, ...] = ()
    skipped: tuple[Line, ...] = ()
    unasked: tuple[Line, ...] = ()
    offers: Mapping[str, Offer] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """``incomplete`` if anything is unknown, ``unused`` if slime_ext would not run, else ``ok``."""
        if self.unread or self.unasked:
            return "incomplete"
        return "ok" if self.uses_ours else "unused"


def check(sources: Sources) -> Answer:
    """Checks a launch script or a YAML file that ``named_sources`` read.

    Raises:
        ConfigError: the first mistake.
    """
    return answer_of(*judged(case_of(sources)))


def answer_of(case: Case, verdict: Verdict) -> Answer:
    """Describes a launch: what it resolves to, what is wrong, and what is unknown.

    Args:
        verdict: the lines of the rules, and of what refuses the offers.
    """
    setup, sources = case.setup, case.sources
    rows, words, offers = dict[str, str](), "", dict[str, Offer]()
    notes = list(map(Line, sources.launch.notes))
    if case.use is Use.KNOWN:
        rows, words = _described(setup)
        notes += map(Line, setup.loaded.notes)
        mapping = _argument(setup, "slime_ext")
        if setup.function not in ("", "correct") and isinstance(mapping, Mapping) and "steps" in mapping:
            line = (
                f"slime_ext.steps of the file replaces the steps of {setup.function}, which "
                f"--custom-tis-function-path names; {contract.TIS}.correct would name none"
            )
            notes.append(Line(line))
    elif case.use is Use.CORRECTION_UNKNOWN:
        words = "used by this launch; its correction is known only where the script runs"
    elif case.use is Use.UNKNOWN:
        words = "not known whether this launch uses it"
    else:
        offers = {when: _offer(when, case) for when in case.offers}
        verb = "mentioned" if "custom_tis_function_path" in setup.unknown else "used"
        words = f"not {verb} by this launch; add these flags" if offers else "cannot be added to this launch"
    return Answer(
        rows or {"slime_ext": words},
        words,
        notes=(*notes, *verdict.broken),
        uses_ours=case.use in (Use.KNOWN, Use.CORRECTION_UNKNOWN),
        unread=tuple(_unread(sources.launch)),
        skipped=verdict.unread,
        unasked=(
            *(Line(f"{doubt}{_of_environment(doubt)}") for doubt in sources.doubts),
            *verdict.unasked,
        ),
        offers=offers,
    )


def _unread(launch: Launch) -> Iterator[str]:
    """Yields a line for each reason why an argument that a rule reads is unknown."""
    # Values that are unknown, in the order of the launch. Of a flag and its off-switch, the last one counts.
    counting: dict[str, WrittenFlag] = {}
    for flag in launch.flags:
        if dest := DESTS.get(flag.name):
            counting.pop(dest, None)
            counting[dest] = flag
    unread = [flag for flag in counting.values() if isinstance(next(iter(flag.values), None), Unread)]
    for flag in unread:
        if ARGUMENTS[DESTS[flag.name]].kind.parse:
            yield (
                f"{flag.where}: {flag}: known only where the script runs, so no rule checks it"
                f"{_of_environment(str(flag))}"
            )

    # Flags that can be there, with the reason that they share.
    reasons: dict[str, list[str]] = {}
    for name in sorted(launch.unknown.keys() & DESTS.keys() - {flag.name for flag in unread}):
        reasons.setdefault(launch.unknown[name], []).append(name)
    for why, names in reasons.items():
        which = "any flag" if why == launch.others else ", ".join(names)
        yield f"{why}: {which} can depend on it{_of_environment(why)}"


def _of_environment(text: str) -> str:
    """Returns how to read the first variable in a text that is set here."""
    names = (name for name in re.findall(r"\$\{?([A-Za-z_]\w*)", text) if name in os.environ)
    return next((f"; add --env {name} to read it" for name in names), "")


def _argument(setup: Setup, name: str) -> Any:
    return getattr(setup.args, name, None)


def _offer(when: str, case: Case) -> Offer:
    """Describes flags that add slime_ext to a launch: those that it lacks, what they do and replace."""
    setup, comments, corrects = case.setup, [ADDS[when]], "use_tis" in OFFERED[when]
    flags = [(flag_of(name), v) for name, v in OFFERED[when].items() if _argument(setup, name) != v]
    spelled = (flag if value is True else f"{flag} {value}" for flag, value in flags)
    if corrects:
        row = _row_of(case.sources.launch)
        comments.append(decision.plain(f"{row.run}: {row.advice}"))
    if corrects and (hook := _argument(setup, "custom_tis_function_path")):
        # What configures that hook.
        system = next((FOREIGN[key] for key in vars(setup.args) if key in FOREIGN), "")
        file = cut(_argument(setup, "custom_config_path") or "")
        convert = f"or run slime-ext convert --from {system} {file}"
        what = f": leave out {file}, which configures that hook, {convert}" if system and file else ""
        comments.append(f"replaces {cut(hook)}{what}")
    elif corrects and _argument(setup, "use_tis"):
        comments.append(f"replaces {setup.host.name if setup.host else 'the host'}'s own weights")
    if init := _argument(setup, "custom_megatron_init_path"):
        comments.append(f"replaces {cut(init)}; or keep that and call slime_ext.host.init(args) in it")
    return Offer(tuple(spelled), tuple(comments))


def _row_of(launch: Launch) -> decision.Row:
    """Returns the row of the decision table that says when a launch needs a correction."""
    arguments = {name: launch.value(flag_of(name)) for name in (*decision.ROUND, "hf_checkpoint")}
    if launch.asynchronous:
        return decision.LAGGING
    return decision.ROUNDED if decision.rounded_by(arguments) else decision.FAR


def _who_corrects(setup: Setup) -> str:
    """Says what corrects the loss of a launch in which slime_ext only measures."""
    deciding = ("use_tis", "get_mismatch_metrics", "custom_tis_function_path", "use_score_centering")
    if unknown := [flag_of(name) for name in deciding if name in setup.unknown]:
        return f"what corrects the loss depends on {' and '.join(unknown)}, unknown here"
    try:
        if setup.replaces_policy_loss:
            return "no correction (--loss-type custom_loss calls no hook)"
    except UnknownError as error:
        return f"what corrects the loss is not known: {error}"
    hook = setup.flags.custom_tis_function_path
    weights = cut(hook) if hook else "the host's own weights"
    # With --get-mismatch-metrics alone, slime also uses the loss that the hook returns, so its weights act.
    switches = ("use_tis", "get_mismatch_metrics")
    named = next((flag_of(name) for name in switches if getattr(setup.flags, name)), "")
    parts = [f"{weights} ({named})"] if named else []
    parts += ["the host's score centering (--use-score-centering)"] if setup.flags.use_score_centering else []
    return f"the loss is corrected by {' and '.join(parts)}" if parts else "no correction (--use-tis is off)"


def _described(setup: Setup) -> tuple[dict[str, str], str]:
    """Describes a correction: as name -> text, and on one line."""
    if not setup.function:
        line = f"measures; {_who_corrects(setup)}"
        return {"slime_ext": line}, line
    correction, keys = setup.loaded.correction, config.to_mapping(setup.loaded.correction)
    mapping = _argument(setup, "slime_ext")
    surrogate = keys["surrogate"]
    rows = {
        "function": f"{contract.TIS}.{setup.function}",
        **({"read as": ", ".join(map(str, mapping))} if mapping else {}),
        "numerator": keys["numerator"],
        "loss": surrogate if isinstance(surrogate, str) else brief([surrogate]),
        "steps": brief(keys["steps"]),
        "masks": keys["mask_scope"],
        **{key: keys[key] for key in ("denominator", "group") if keys[key] not in ("host", "ignore")},
        "needs": needs(correction),
    }
    is_seed = setup.function in contract.SLIME_FUNCTIONS
    if bounds := [dest for dest in BOUNDS if is_seed and dest in setup.unknown]:
        rows["steps"] += f" with the defaults of {', '.join(map(flag_of, bounds))}"
    return rows, f"{setup.function}: {one_line(keys)}"

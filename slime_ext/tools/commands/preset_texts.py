"""Formats presets for ``slime-ext presets``: as a list, as YAML and as plain torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

from slime_ext import presets
from slime_ext.config.files import of_package, read_mapping
from slime_ext.config.load import to_mapping
from slime_ext.tools import decision
from slime_ext.tools.commands.output import console, plain, yaml_of
from slime_ext.tools.plain_torch import function_of, obstacle
from slime_ext.tools.wording import file_of, flags_of, needs

START = ("metrics_only", "token_tis")
# Kind of run -> the title of its presets. A preset of several kinds is in the first of them.
TITLES = {
    "start": "Start with these",
    "async": "The sampler's weights are older",
    "moe": "Mixture-of-experts models",
    "long": "Long responses",
    "": "Short responses, and the settings of other systems",
}


def print_preset(name: str) -> None:
    """Prints a preset as YAML and as plain torch. Raises ConfigError for an unknown name."""
    print(plain(f"{text_of(name)}\n\n{torch_of(name)}"))


def text_of(name: str) -> str:
    """Returns the YAML file of a preset or an alias, with comments on its use."""
    preset, canonical = presets.find(name), presets.ALIASES.get(name, name)
    lines = {
        f"{name} is another name of {canonical}": name != canonical,
        f"{canonical}: {preset.formula}": True,
        **{
            f"{key.capitalize()}: {advice().get(canonical, {}).get(key)}": canonical in advice()
            for key in ("use", "risk")
        },
        f"Needs: {needs(preset.correction)}": True,
        f"Source: {preset.source}": True,
    }
    wrapped = [_comment(line) for line, is_said in lines.items() if is_said]
    keys = file_of(to_mapping(preset.correction), preset.correction)
    flags = f"# Flags: {flags_of(canonical, preset.correction)}"
    return "\n".join([flags, *wrapped, "", yaml_of(keys)])


def torch_of(name: str) -> str:
    """Returns the function in plain torch, or a comment that says why there is none."""
    why_not = obstacle(presets.get(name))
    if why_not:
        return _comment(f"Cannot be written in plain torch for one response: {why_not}")
    written = f"# The same in plain torch (--out {name}.py writes it):"
    return f"{written}\n\n{function_named(name)}"


def function_named(name: str) -> str:
    """Returns the function in plain torch. Raises ConfigError if one response is not enough."""
    preset = presets.find(name)
    return function_of(name, preset.correction, preset.formula)


def _comment(text: str) -> str:
    return textwrap.fill(f"# {text}", 100, subsequent_indent="#   ", break_on_hyphens=False)


@cache
def advice() -> dict[str, Any]:
    """Reads configs/presets.yaml.

    It has, by name, when to use a preset, its risk, and the kinds of runs it is for.
    """
    return read_mapping(str(of_package("configs/presets.yaml")))


def print_table(kind: str | None, rows: Sequence[decision.Row] = ()) -> None:
    """Prints each preset in about two lines, grouped by what one would use it for.

    Args:
        kind: a kind of run, for which only the presets and the ``rows`` of the decision table are printed.
    """
    out = console()
    for title, names in groups(kind).items():
        out.print(title, style="bold", markup=False)
        for name in names:
            aliases = [alias for alias, other in presets.ALIASES.items() if other == name]
            also = f" (= {', '.join(aliases)})" if aliases else ""
            said = f"  {name}{also}: {brief_use(name)}"
            lines = textwrap.fill(
                said, out.width, subsequent_indent="      ", break_on_hyphens=False, break_long_words=False
            )
            out.print(lines, markup=False, soft_wrap=True)
    for applicable in rows:
        line = f"\n{decision.plain(applicable.run)}: {decision.plain(applicable.advice)}."
        out.print(line, markup=False, highlight=False)


def groups(kind: str | None = None) -> dict[str, list[str]]:
    """Returns presets by what one would use them for: the first kind of run in ``configs/presets.yaml``.

    Args:
        kind: a kind of run; only the presets for it are returned, in one group.
    """
    kinds = {name: advice().get(name, {}).get("for", ()) for name in presets.PRESETS}
    if kind is not None:
        return {f"Presets for {kind}": [name for name, of in kinds.items() if kind in of]}
    grouped: dict[str, list[str]] = {title: [] for title in TITLES.values()}
    for name, of in kinds.items():
        first = next((each for each in TITLES if each in of), "")
        grouped[TITLES["start" if name in START else first]].append(name)
    return grouped


def brief_use(name: str) -> str:
    """Returns the first sentence about when to use a preset."""
    sentence, *more = advice().get(name, {}).get("use", "").split(". ", 1)
    return f"{sentence}." if more else sentence

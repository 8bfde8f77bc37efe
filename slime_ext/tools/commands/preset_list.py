"""Lists the presets for ``slime-ext presets``. Imports no torch, which takes two seconds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

from slime_ext.aliases import ALIASES
from slime_ext.config.files import of_package, read_mapping
from slime_ext.tools import decision
from slime_ext.tools.commands.output import console

START = ("metrics_only", "token_tis")
# Kind of run -> the title of its presets. A preset of several kinds is in the first of them.
TITLES = {
    "start": "Start with these",
    "async": "The sampler's weights are older",
    "moe": "Mixture-of-experts models",
    "long": "Long responses",
    "": "Short responses, and the settings of other systems",
}


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
            aliases = [alias for alias, other in ALIASES.items() if other == name]
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
    kinds = {name: entry.get("for", ()) for name, entry in advice().items()}
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

"""Formats one preset for ``slime-ext presets NAME``: as YAML and as plain torch."""

from __future__ import annotations

import textwrap

from slime_ext import presets
from slime_ext.config.load import to_mapping
from slime_ext.tools.commands.output import plain, yaml_of
from slime_ext.tools.commands.preset_list import advice
from slime_ext.tools.plain_torch import function_of, obstacle
from slime_ext.tools.wording import file_of, flags_of, needs


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

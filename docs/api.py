"""Lets the API reference read our docstrings: comments behind fields, and examples without a heading.

mkdocs.yml loads it as an extension of griffe, which reads the sources for mkdocstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLES = re.compile(r"^>>> (?:.+\n?)+", re.M)


class OurDocstrings(griffe.Extension):
    """The two habits of this package that griffe does not know."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """``name: type  # what it is`` documents a field: those of a class become its Attributes."""
        fields = [f"    {name}: {text}" for name, text in map(_commented, cls.attributes.values()) if text]
        if cls.docstring is not None and fields:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(fields)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Examples get the heading that griffe looks for."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLES.sub(_under_a_heading, obj.docstring.value)


def _commented(field: griffe.Attribute) -> tuple[str, str]:
    line = field.source.splitlines()[0] if field.source else ""
    return field.name, line.partition("  # ")[2]


def _under_a_heading(found: re.Match[str]) -> str:
    return "Examples:\n" + re.sub("^(?=.)", "    ", found[0], flags=re.M)

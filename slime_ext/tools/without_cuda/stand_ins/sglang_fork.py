"""A module of miles' fork of SGLang that PyPI's SGLang 0.5.23 does not hold.

miles 31f1ca9 (utils/chat_template_utils/deepseek.py:19) imports the chat format of DeepSeek V4 whatever the
model is. The module that is made here refuses to be used.
"""

from __future__ import annotations

from types import ModuleType


def refuse_use(module: ModuleType) -> None:
    """Gives `module` no name at all; asking for one raises AttributeError with the reason."""

    def missing(name: str) -> object:
        raise AttributeError(
            f"{module.__name__}.{name}: only miles' fork of SGLang has the format of DeepSeek V4"
        )

    module.__getattr__ = missing

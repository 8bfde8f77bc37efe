"""Prompts of real text for SmolLM2: sums as `make train` has them, sums in words, stories and questions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.dump import Turn

CHAT = "<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n"
LENGTH = 25  # tokens of every prompt, so that a batch needs no padding
# Said before a question until the prompt has its length.
BEFORE = (
    "",
    "Hi. ",
    "Please. ",
    "Hi there. ",
    "Hello to you. ",
    "Answer. ",
    "Answer now. ",
    "Please answer. ",
)
BEFORE += ("Please answer me. ", "Please answer me now. ", "Please answer this one. ", "Here is one more. ")
BEFORE += ("Here is one more for you. ", "Here is one more question for you. ", "A question. ")
BEFORE += ("Now here is one more question for you. ", "Now here is one more short question for you. ")
SUM = "What is {0} + {1}?"
WORDS = "Tom has {0} books and buys {1} more. How many?"
STORY = "Write a story about a {0}."
FACT = "What is the capital of {0}?"
THINGS = "fox boat king river dog farm star ship bird tree house garden wolf city road song".split()
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Spain": "Madrid"}
CAPITALS |= {"Germany": "Berlin", "Russia": "Moscow", "China": "Beijing", "Cuba": "Havana", "Peru": "Lima"}
TOOL = "\nresult: 47, checked\n"


@dataclass(frozen=True, repr=False)
class RealText:
    """Prompts of one length, their rewards, and a tool's answer.

    Args:
        tokenizer: the model's, of transformers.
        kinds: of prompts: "sum", "words", "story", "fact".
        end: the token that ends a response; None where the text goes on.
    """

    tokenizer: Any
    kinds: tuple[str, ...] = ("sum", "words", "story", "fact")
    end: int | None = 2
    labels: dict[tuple[int, ...], str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"RealText({self.kinds}, {self.end})"

    @classmethod
    def of(cls, folder: Path, **more: Any) -> RealText:
        """With the tokenizer of a model's folder."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(folder), **more)

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        """[count, LENGTH] ids."""
        rows = []
        while len(rows) < count:
            text, label = self._question(generator)
            ids = self._padded(text)
            if ids:
                self.labels[tuple(ids)] = label
                rows.append(ids)
        return torch.tensor(rows)

    def _question(self, g: torch.Generator) -> tuple[str, str]:
        a, b, which = torch.randint(1, 10, (3,), generator=g).tolist()
        kind = self.kinds[int(torch.randint(len(self.kinds), (1,), generator=g))]
        if kind in ("sum", "words"):
            return (SUM if kind == "sum" else WORDS).format(a, b), str(a + b)
        if kind == "story":
            thing = THINGS[(9 * a + which) % len(THINGS)]
            return STORY.format(thing), thing
        country = list(CAPITALS)[(9 * a + which) % len(CAPITALS)]
        return FACT.format(country), CAPITALS[country]

    def _padded(self, text: str) -> list[int] | None:
        made = (self.tokenizer(CHAT.format(before + text)).input_ids for before in BEFORE)
        return next((ids for ids in made if len(ids) == LENGTH), None)

    @cached_property
    def _tool(self) -> Tensor:
        return torch.tensor(self.tokenizer(TOOL).input_ids)

    def tool(self, generator: torch.Generator) -> Tensor:
        """Ids of a tool's answer."""
        return self._tool

    def reward(self, turn: Turn) -> float:
        """1 if the last number of the answer is the sum, or the word is in it."""
        label, said = self.labels.get(tuple(turn.prompt.tolist()), ""), self.decode(turn.tokens)
        if label.isdigit():
            return float(re.findall(r"\d+", said)[-1:] == [label])
        return float(bool(label) and label in said)

    def decode(self, ids: Tensor) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(ids.tolist())

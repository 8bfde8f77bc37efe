"""Names what slime_ext looks for in a host's code, and asks that code questions.

A host is recognised by three functions that its modules define. In every release of slime, miles and their
forks, the policy loss and the optimizer step have these names and first parameters, in whatever module:

    policy_loss_function(args, batch, logits, sum_of_sample_mean)
    get_log_probs_and_entropy(logits, ...)     a global of the policy loss's module
    train_one_step(args, rollout_id, step_id, data_iterator, model, ...)
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

LOSS, TARGET, STEP = "policy_loss_function", "get_log_probs_and_entropy", "train_one_step"
RESPONSES = "get_responses"  # cuts a micro-batch's logits into its samples
SCORE = "forward_only"  # computes a rollout's log-probs with ``TARGET`` before it is trained
TRAIN = "train_actor", "_train_actor"  # scores and trains a rollout; the second name is later miles'
LEADING = {
    LOSS: ("args", "batch", "logits", "sum_of_sample_mean"),
    TARGET: ("logits",),
    STEP: ("args", "rollout_id", "step_id", "data_iterator", "model"),
}
DOCS = "use a release that docs/slime.md lists"
PASSED = {  # keyword of the hook -> pattern for a dictionary with that key in the policy loss's source
    "cur_log_probs": re.compile(r"[\"'](?:cur_log_probs|current_log_probs)[\"']\s*:"),
    "advantages": re.compile(r"[\"']advantages[\"']\s*:"),
}


class Door(NamedTuple):
    """Names a host function that slime_ext wraps: its module and its parameters."""

    module: str
    parameters: tuple[str, ...]


class HostCode(ABC):
    """Answers questions about a host from its source code.

    The code is that of a running host (``Host``), or of a checkout (``slime_ext.tools.checkout``). Both give
    the same answers.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The host's package, such as slime or miles."""

    @abstractmethod
    def door(self, name: str) -> Door | None:
        """Finds the function ``LOSS``, ``TARGET`` or ``STEP``. Returns None if the host has none."""

    @abstractmethod
    def defines(self, name: str) -> bool:
        """Tells whether a module of the host defines the function ``name``."""

    @abstractmethod
    def accepts(self, dest: str, args: Any) -> bool:
        """Tells whether the host's command line has the flag of an argument."""

    def flags(self) -> frozenset[str]:
        """Returns the flags that the host's own code names; none if it cannot tell."""
        return frozenset()

    @abstractmethod
    def loss_text(self) -> str:
        """Returns the source of the policy loss's module."""

    @abstractmethod
    def near_texts(self) -> Iterator[str]:
        """Yields the source of each module in the policy loss's package."""

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """Yields the source of each module of the host."""

    @property
    def has_step(self) -> bool:
        """Whether the host trains with ``train_one_step``; FSDP trainers do not."""
        return self.door(STEP) is not None

    def passes(self, keyword: str) -> bool:
        """Tells whether the host itself passes a keyword to the hook.

        Hosts with slime PR 2084 or with our patch pass cur_log_probs.
        """
        return bool(PASSED[keyword].search(self.loss_text()))

    @property
    def carries_versions(self) -> bool:
        """Whether the trainer gets the samples' weight versions (miles, a patched slime)."""
        return any('train_data["weight_versions"]' in text for text in self.texts())

    @property
    def may_skip_proximal(self) -> bool:
        """Whether the host may skip proximal log-probs in a one-step rollout (slime since v0.3.0)."""
        return any("can_reuse_log_probs_in_loss" in text for text in self.near_texts())

    @property
    def replays_top_p(self) -> bool:
        """Whether the host normalises its log-probs over the tokens that --rollout-top-p leaves.

        Its samples then hold these tokens (slime since v0.3.1, vime).
        """
        return any("top_p_token_offsets" in text for text in self.near_texts())

    @property
    def fault(self) -> str:
        """The error message if a function that slime_ext wraps has other first parameters; else empty."""
        for name, wanted in LEADING.items():
            door = self.door(name)
            if door is None and name == STEP:
                continue
            module, parameters = door or (self.loss_module, None)
            if (parameters or ())[: len(wanted)] != wanted:
                got = "none" if parameters is None else f"({', '.join(parameters[: len(wanted)])})"
                return (
                    f"{module}: expected {name}({', '.join(wanted)}, ...), got {got}: this release is not "
                    f"known; {DOCS}"
                )
        return ""

    @property
    @abstractmethod
    def loss_module(self) -> str:
        """The dotted name of the policy loss's module."""

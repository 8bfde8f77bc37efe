"""Times score centering with a head of 128 beside slime's own, interleaved.

    python -m benchmarks.speed center

One table has the term with its gradient of the head's log-probs. The other has the head's log-probs with
their gradient of the logits.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.fidelity.exact import WEIGHTS
from benchmarks.speed.cost import count, medians
from benchmarks.speed.others import slime_centering, slime_log_probs
from benchmarks.speed.workloads import lengths_of
from slime_ext.core.centering import mean_score
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Reinforce
from slime_ext.core.tokens import Head
from slime_ext.ops.vocabulary import log_probs_at

TOP_K = 128
TOKENS, VOCABULARY = 1024, 151_936  # shape of the logits, in bfloat16
CHUNK = 256  # rows of the logits that slime processes at once (its flag --log-probs-chunk-size)
MODES = {"f = 1": {"mode": "none"}, "IcePop 0.5 to 2": {"mode": "mis", "low": 0.5, "high": 2.0}}
Bodies = dict[str, Callable[[], object]]


def terms(slime: str | None, tokens: int) -> Bodies:
    """Returns functions for the term and its gradient, from log-probs at the same tokens."""
    torch.manual_seed(0)
    sampler = torch.randn(tokens, TOP_K).sub_(6).clamp_(max=-5)
    trainer = (sampler + torch.randn(tokens, TOP_K) * 2e-3).requires_grad_()
    advantages, counts = torch.randn(tokens), torch.ones(tokens, dtype=torch.bool)
    theirs = slime_centering(slime) if slime else None

    def ours(name: str) -> object:
        run = Correction("target", Reinforce(), WEIGHTS[name]).run
        term = advantages * mean_score(WEIGHTS[name], Head(sampler, trainer), advantages, counts, run, TOP_K)
        return torch.autograd.grad(term.sum(), trainer)

    def own(name: str) -> object:
        term = advantages * theirs(trainer, sampler, **MODES[name])[0]
        return torch.autograd.grad(term.sum(), trainer)

    both = {"ours": ours} | ({"slime": own} if slime else {})
    return {f"{who}, {name}": partial(body, name) for name in MODES for who, body in both.items()}


def log_probs(slime: str | None, tokens: int, vocabulary: int) -> Bodies:
    """Returns functions for the head's log-probs and the gradient of the logits."""
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocabulary, dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(vocabulary, (tokens, TOP_K))
    slope = torch.randn(tokens, TOP_K)

    def back(of: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(of(), logits, slope)

    bodies: Bodies = {"ours": back(lambda: log_probs_at(logits, ids))}
    if slime:
        theirs = slime_log_probs(slime)
        bodies["slime"] = back(lambda: theirs(logits, ids, None, CHUNK))
        bodies["slime, not in chunks"] = back(lambda: theirs(logits, ids, None))
    return bodies


def table(title: str, bodies: Bodies, repeat: int) -> Table:
    """Returns a table of processor milliseconds, and of megabytes of new tensors at once."""
    times = medians(bodies, repeat)
    shown = Table("", "processor ms", "peak MB", title=title)
    for name, body in bodies.items():
        shown.add_row(name, f"{times[name]:.0f}", f"{count(body).peak:.0f}")
    return shown


def run(asked: Namespace) -> None:
    """Prints two tables."""
    torch.set_num_threads(1)
    console = Console(width=100)
    tokens = sum(lengths_of("b"))
    console.print(table(f"term of {tokens:,} tokens", terms(asked.slime_dir, tokens), asked.repeat))
    of_logits = log_probs(asked.slime_dir, TOKENS, VOCABULARY)
    console.print(table(f"log-probs from {TOKENS:,} x {VOCABULARY:,}", of_logits, asked.repeat))

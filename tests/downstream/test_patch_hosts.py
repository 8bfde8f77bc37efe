"""The patches on real hosts, on and off again.

``HOSTS=path/to/hosts pytest tests/downstream/test_patch_hosts.py``
"""

from __future__ import annotations

import ast
from argparse import Namespace

import pytest
import torch
from megatron.core import mpu

from tests.downstream.checkouts import apply_patch
from tests.downstream.host_loss import DEFAULTS, HOSTS, samples
from tests.ranks import run_ranks

LINES = {"slime": 7, "miles": 4}  # that a host lacks; miles brings its versions to training itself
VERSIONS = [["3"], ["3", "4"], ["4"], ["4"], ["5"], ["5"], [], ["6"]]
pytestmark = [pytest.mark.slow]


def python_files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*.py"))}


def test_a_patch_adds_its_lines_and_comes_off(host, copy):
    before = python_files(copy)
    apply_patch(host.folder, copy)
    patched = python_files(copy)
    changed = [path for path in before if before[path] != patched[path]]
    assert (
        sum(len(patched[p].splitlines()) - len(before[p].splitlines()) for p in changed) == LINES[host.name]
    )
    for path in changed:
        ast.parse(patched[path], str(path))
    apply_patch(host.folder, copy, "-R")
    assert python_files(copy) == before


SEEN = []


def recording_hook(args, *, pg_loss, loss_masks, cur_log_probs, advantages, weight_versions, **kwargs):
    """Keeps what it was given, and lets the gradient of the target's log-probs into the loss."""
    SEEN.append((cur_log_probs, advantages, weight_versions))
    drift = torch.cat(cur_log_probs) - torch.cat(kwargs["train_log_probs"])
    return pg_loss + 0.1 * drift.square(), loss_masks, {}


def own_loss(name, folder, cp, hook):
    """(loss, gradient, what the hook saw, response tokens here) of the host's own loss on this rank."""
    torch._dynamo.config.disable = True
    mpu.initialize_model_parallel(context_parallel_size=cp)
    host, args = HOSTS[name](str(folder)), Namespace(**DEFAULTS | {"custom_tis_function_path": hook})
    batch = host.batch(args, samples()) | {"weight_versions": VERSIONS}
    logits = host.logits(args, samples())
    loss, _, _ = host.loss(args, batch, 2, logits)
    loss.backward()
    seen = [[(x.requires_grad or not len(x), len(x)) for x in current] for current, *_ in SEEN]
    return (
        loss.detach(),
        logits.grad,
        seen,
        [(len(a), v) for _, a, v in SEEN],
        [*map(len, batch["log_probs"])],
    )


@pytest.fixture
def both(host, copy):
    """The host as it is, and patched."""
    apply_patch(host.folder, copy)
    return host.folder, copy


def test_the_hook_gets_its_keywords_with_gradient(host, both):
    for cp in (1, 2):
        hooked, plain = (
            run_ranks(own_loss, cp, host.name, both[1], cp, hook)
            for hook in (f"{__name__}.recording_hook", "slime_ext.tis.metrics_only")
        )
        for (_, gradient, seen, others, lengths), (_, without, *_) in zip(hooked, plain, strict=True):
            assert seen == [[(True, length) for length in lengths]]
            assert others == [(len(VERSIONS), VERSIONS)]
            assert float((gradient - without).abs().max()) > 1e-4


def test_a_hook_that_needs_nothing_new_gives_the_same_loss(host, both):
    (stock,), (patched,) = (run_ranks(own_loss, 1, host.name, folder, 1, None) for folder in both)
    assert torch.equal(stock[0], patched[0])
    assert torch.equal(stock[1], patched[1])

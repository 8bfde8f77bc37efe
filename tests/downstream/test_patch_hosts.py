"""The patches on real hosts, on and off again.

``HOSTS=path/to/hosts pytest tests/downstream/test_patch_hosts.py``
"""

from __future__ import annotations

import ast
import sys

import pytest
import torch

from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.batching import Layout, pack_micro_batch
from slime_ext.patching.declared import load_patches
from slime_ext.patching.main import main
from slime_ext.patching.plan import status
from slime_ext.patching.tree import Tree
from tests.launcher.megatron.tiny_model import LAYOUTS
from tests.launcher.megatron.tiny_rollout import arguments, rollout
from tests.ranks import run_ranks

LINES = {"slime": 7, "miles": 4}  # that a host lacks; miles brings its versions to training itself
VOCAB = 48
VERSIONS = [["3"], ["3", "4"], ["4"], ["4"], ["5"], ["5"], [], ["6"]]
pytestmark = [pytest.mark.slow]


def python_files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*.py"))}


def states(folder):
    return [status(Tree(folder), patch).state for patch in load_patches()]


def test_they_go_on_and_come_off(host, copy, capsys):
    before = python_files(copy)
    assert states(copy) == ["not applied", "not applied"]
    assert main(["apply", str(copy)]) == 0
    patched = python_files(copy)
    assert states(copy) == ["applied", "applied"]
    assert b"".join(patched.values()).count(b"# slime-ext patch 000") == LINES[host.name]
    for path in (path for path in before if before[path] != patched[path]):
        ast.parse(patched[path], str(path))
    assert main(["apply", str(copy)]) == 0
    assert python_files(copy) == patched
    assert main(["revert", str(copy)]) == 0
    assert python_files(copy) == before
    assert "warning" not in capsys.readouterr().err


SLIME_ARGS = {
    "use_opsm": False,
    "use_kl_loss": False,
    "log_probs_chunk_size": -1,
    "allgather_cp": False,
    "loss_type": "policy_loss",
    "use_rollout_top_p_replay": False,
    "rollout_top_p": 1.0,
}
SEEN = []


def recording_hook(args, *, pg_loss, loss_masks, cur_log_probs, advantages, weight_versions, **kwargs):
    """Keeps what it was given, and lets the gradient of the target's log-probs into the loss."""
    SEEN.append((cur_log_probs, advantages, weight_versions, kwargs["train_log_probs"]))
    drift = torch.cat(cur_log_probs) - torch.cat(kwargs["train_log_probs"])
    return pg_loss + 0.1 * drift.square(), loss_masks, {}


def patched_loss(layout, folder, hook):
    """(loss, gradient, what the hook saw) of slime's own loss on this rank."""
    sys.path.insert(0, str(folder))
    args = arguments(layout, dtype=torch.float32, custom_tis_function_path=hook)
    vars(args).update(SLIME_ARGS)
    parallel.initialize(args)
    from slime.backends.megatron_utils.loss import loss_function

    samples, cp = rollout(8), parallel.cp_group()
    batch = pack_micro_batch(samples, Layout(cp_rank=cp.rank(), cp_size=cp.size()))
    draw = torch.Generator().manual_seed(cp.rank())
    logits = torch.randn(1, batch.input_ids.size(1), VOCAB, generator=draw, requires_grad=True)
    loss, _, _ = loss_function(args, slime_batch(batch, samples, draw), 2, 8, logits)
    loss.backward()
    seen = [[(x.requires_grad, x.numel()) for x in c] for c, *_ in SEEN]
    return loss.detach(), logits.grad, seen, [(len(a), v) for _, a, v, _ in SEEN], batch.local_lengths


def slime_batch(batch, samples, draw):
    return {
        "advantages": batch.advantages,
        "log_probs": [torch.rand(n, generator=draw) * -4 for n in batch.local_lengths],
        "rollout_log_probs": batch.rollout_log_probs,
        "unconcat_tokens": [torch.tensor(s.tokens) for s in samples],
        "total_lengths": batch.total_lengths,
        "response_lengths": batch.response_lengths,
        "loss_masks": batch.loss_masks,
        "rollout_mask_sums": list(batch.denominators),
        "weight_versions": VERSIONS,
    }


@pytest.fixture
def both(host, copy):
    """slime's newest commit as it is, and patched."""
    if not host.module("slime.observability.rollout_metrics"):
        pytest.skip("the arguments are those of slime since 624b824")
    main(["apply", str(copy)])
    return host.folder, copy


def test_the_hook_gets_its_keywords_with_gradient(both, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for layout in ("one", "cp2"):
        size = LAYOUTS[layout][0]
        hooked = run_ranks(patched_loss, size, layout, both[1], f"{__name__}.recording_hook")
        plain = run_ranks(patched_loss, size, layout, both[1], "slime_ext.tis.metrics_only")
        for (_, gradient, seen, others, lengths), (_, without, *_) in zip(hooked, plain, strict=True):
            assert seen == [[(True, length) for length in lengths]]
            assert others == [(8, VERSIONS)]
            assert float((gradient - without).abs().max()) > 1e-4


def test_a_hook_that_needs_nothing_new_gives_the_same_loss(both, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    hook = "slime.backends.megatron_utils.loss.vanilla_tis_function"
    (stock,), (patched,) = (run_ranks(patched_loss, 1, "one", folder, hook) for folder in both)
    assert torch.equal(stock[0], patched[0])
    assert torch.equal(stock[1], patched[1])

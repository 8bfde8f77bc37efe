"""The patches on real hosts: every release of slime since v0.2.0, its newest commit, and miles.

``SLIME_GIT=path/to/repository MILES_GIT=path/to/repository pytest tests/downstream/test_patch_hosts.py``;
a repository may be bare. Without them these tests say that they skip.
"""

from __future__ import annotations

import ast
import shutil
import sys

import pytest
import torch

from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.batching import Layout, pack_micro_batch
from slime_ext.patching.declared import load_patches
from slime_ext.patching.main import main
from slime_ext.patching.plan import status
from slime_ext.patching.tree import Tree
from tests.downstream.checkouts import REPOSITORIES, extract, folder_of, git, of_host
from tests.launcher.distributed import run_ranks
from tests.launcher.megatron.tiny_model import LAYOUTS
from tests.launcher.megatron.tiny_rollout import arguments, rollout

SLIME_GIT = REPOSITORIES["slime"]
TOO_OLD = ("v0.1.0",)
VOCAB = 48
VERSIONS = [["3"], ["3", "4"], ["4"], ["4"], ["5"], ["5"], [], ["6"]]
pytestmark = [pytest.mark.slow]
needs_slime = pytest.mark.skipif(not SLIME_GIT, reason="SLIME_GIT names no slime repository")


def releases():
    if not SLIME_GIT:
        return [pytest.param("", marks=pytest.mark.skip("SLIME_GIT names no slime repository"))]
    return [*(tag for tag in git(SLIME_GIT, "tag").decode().split() if tag.startswith("v")), "HEAD"]


def python_files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*.py"))}


def states(folder):
    return [status(Tree(folder), patch).state for patch in load_patches()]


def goes_on_and_comes_off(folder, missing):
    """One host through every action; ``missing`` is how many lines it lacks."""
    before = python_files(folder)
    assert states(folder) == ["not applied", "not applied"]
    assert main(["apply", str(folder)]) == 0
    patched = python_files(folder)
    assert states(folder) == ["applied", "applied"]
    added = b"".join(patched.values()).count(b"# slime-ext patch 000")
    assert added == missing
    for path in (path for path in before if before[path] != patched[path]):
        ast.parse(patched[path], str(path))
    assert main(["apply", str(folder)]) == 0
    assert python_files(folder) == patched
    assert main(["revert", str(folder)]) == 0
    assert python_files(folder) == before


@pytest.mark.parametrize("release", releases())
def test_slime(release, tmp_path, capsys):
    folder = extract("slime", release, tmp_path)
    if release in TOO_OLD:  # before the hook existed
        assert states(folder)[0] == "unknown host"
        return
    goes_on_and_comes_off(folder, 7)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("pair", of_host("miles"))
def test_miles_which_brings_its_versions_to_training_itself(pair, tmp_path):
    stock = folder_of(pair, tmp_path / "stock")
    shutil.copytree(stock / "miles", tmp_path / "copy/miles")
    goes_on_and_comes_off(tmp_path / "copy", 4)


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


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """slime's newest commit as it is, and patched."""
    stock, patched = (
        extract("slime", "HEAD", tmp_path_factory.mktemp(name)) for name in ("stock", "patched")
    )
    main(["apply", str(patched)])
    return stock, patched


@needs_slime
@pytest.mark.parametrize("layout", ["one", "cp2"])
def test_the_hook_gets_its_keywords_with_gradient(head, layout, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    size = LAYOUTS[layout][0]
    hooked = run_ranks(patched_loss, size, layout, head[1], f"{__name__}.recording_hook")
    plain = run_ranks(patched_loss, size, layout, head[1], "slime_ext.tis.metrics_only")
    for (_, gradient, seen, others, lengths), (_, without, *_) in zip(hooked, plain, strict=True):
        assert seen == [[(True, length) for length in lengths]]
        assert others == [(8, VERSIONS)]
        assert float((gradient - without).abs().max()) > 1e-4


@needs_slime
def test_a_hook_that_needs_nothing_new_gives_the_same_loss(head, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    hook = "slime.backends.megatron_utils.loss.vanilla_tis_function"
    (stock,), (patched,) = (run_ranks(patched_loss, 1, "one", folder, hook) for folder in head)
    assert torch.equal(stock[0], patched[0])
    assert torch.equal(stock[1], patched[1])

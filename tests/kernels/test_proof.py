"""Kernels are taken where they were seen to do what the eager path does: here in Triton's interpreter."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from slime_ext.kernels import proof
from slime_ext.kernels.triton import Call
from slime_ext.metrics import Layout

SMALL = (proof.Case((5, 0, 30), 2e-3),)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "cache_folder", lambda: tmp_path)
    proof.record.cache_clear()
    yield tmp_path
    proof.record.cache_clear()


@pytest.mark.slow
def test_the_kernels_do_what_the_eager_path_does():
    planned = proof.Case((20, 0, 3), 0.3, planned=True)
    assert list(proof.differences("cpu", ("seq_mis",), SMALL)) == []
    assert list(proof.differences("cpu", ("topr", "kpop"), (planned,))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", proof.NAMES)
def test_what_is_compared_is_kept_in_part(name):
    """In batches of many sequences some tokens and not all, in a long sequence many."""
    shares = []
    for case in proof.CASES:
        batch, plan = proof.batch_of(case, torch.float32, "cpu")
        keep = proof.correction_of(name, case)(batch, plan).keep
        shares.append(float(keep.sum() / batch.segments.mask.sum().clamp(min=1)))
        assert max(case.lengths) < 1000 or shares[-1] > 0.5, case
    assert any(0.02 < share < 0.98 for share in shares), shares


def spoil(monkeypatch, change):
    """Changes what the second kernel wrote; without curves, which take the interpreter seconds."""
    correct = Call.correct
    monkeypatch.setattr(proof, "Layout", SimpleNamespace(of=lambda c: Layout.of(c, curves=False)))

    def spoiled(call):
        correct(call)
        change(call.arrays)

    monkeypatch.setattr(Call, "correct", spoiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays: arrays["keeps"].logical_not_(), "they keep other tokens"),
        (lambda arrays: arrays["products"].mul_(1.001), "another loss"),
        (lambda arrays: arrays["factors"].mul_(1.001), "another gradient"),
        (lambda arrays: arrays["ratios"].add_(1e-3), "another ratio"),
        (lambda arrays: arrays["rows"].mul_(1.001), "another sums"),
        (lambda arrays: arrays["products"].add_(torch.rand(()) * 1e-6), "not the same bits twice"),
    ],
)
def test_a_kernel_that_does_otherwise_is_told(monkeypatch, change, said):
    spoil(monkeypatch, change)
    (found, *_) = proof.differences("cpu", ("seq_mis",), SMALL)
    assert found.startswith("seq_mis, torch.float32, 3 sequences of 35 tokens: ") and said in found


def test_what_passed_is_kept_and_what_did_not_is_said(monkeypatch, capsys):
    monkeypatch.setattr(proof, "differences", lambda device: iter(["token_tis: another loss"]))
    assert proof.main("cpu") == 1 and capsys.readouterr().out == "token_tis: another loss\n"
    assert not proof.record("cpu").exists()
    monkeypatch.setattr(proof, "differences", lambda device: iter([]))
    assert proof.main("cpu") == 0 and proof.record("cpu").exists()


def test_another_version_must_be_proven_again(monkeypatch):
    first = proof.record("cpu")
    proof.record.cache_clear()
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert proof.record("cpu") != first


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("pass", ""),
        ("print('seq_mis: another loss'); raise SystemExit(1)", "seq_mis: another loss"),
        ("import os; os.abort()", "it ended with -6"),
        ("raise RuntimeError('no device')", "RuntimeError: no device"),
    ],
)
def test_a_kernel_that_ends_its_process_ends_no_other(monkeypatch, program, said):
    monkeypatch.setattr(proof, "COMMAND", (sys.executable, "-c", program))
    assert proof.prove() == said


def test_a_process_that_uses_no_device_has_proven_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    proof.record("cpu").touch()
    assert not proof.is_proven()

"""Which backend serves what, and what start-up says about it."""

from __future__ import annotations

import pytest

from slime_ext import presets
from slime_ext.config import read_config
from slime_ext.correction import Correction
from slime_ext.dialects.scoped import ScopedReweight
from slime_ext.errors import ConfigError
from slime_ext.kernels import backend_for, built, choose, describe
from slime_ext.kernels import select as module
from slime_ext.steps import Truncate
from tests.kernels.batches import FULL


def test_auto_takes_cpp_on_a_cpu():
    chosen = choose(FULL, "cpu")
    assert chosen.name == "compiled" and chosen.why.startswith("C++ by ")
    assert type(backend_for(FULL, "cpu")).__name__ == "Loops"


def test_auto_stays_eager_until_the_kernels_are_proven_on_the_device(monkeypatch):
    monkeypatch.setattr(module, "_has_triton", lambda: True)
    assert choose(FULL, "cuda").name == "eager" and "doctor --kernels" in describe(FULL, "cuda")
    assert choose(FULL, "cuda", "triton").name == "triton"


@pytest.fixture
def proven(monkeypatch):
    monkeypatch.setattr(module, "_has_triton", lambda: True)
    monkeypatch.setattr(module, "is_proven", lambda: True)


def test_auto_takes_triton_where_it_is_proven(monkeypatch, proven):
    assert choose(FULL, "cuda") == ("triton", "proven on this device")
    monkeypatch.setattr(module, "_has_triton", lambda: False)
    assert choose(FULL, "cuda") == ("eager", "triton is not installed")


def test_auto_has_no_kernels_for_other_devices(proven):
    assert choose(FULL, "xpu") == ("eager", "no kernels for xpu")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("turn_tis", "a statistic over turns stays eager"),
        ("min_prefix", "a minimum over prefixes stays eager"),
    ],
)
def test_what_no_kernel_knows_stays_eager_and_says_so(name, why, proven):
    for backend, device in (("compiled", "cpu"), ("triton", "cuda"), ("auto", "cuda")):
        assert choose(presets.get(name), device, backend) == ("eager", why)


def test_steps_of_other_systems_blocks_stay_eager(proven):
    correction = Correction(steps=(ScopedReweight("geometric", clamp=20.0), Truncate(2.0)))
    assert choose(correction, "cuda").name == choose(correction, "cpu", "compiled").name == "eager"
    assert "statistics of its own" in describe(correction, "cuda")


def test_without_a_compiler_compiled_is_eager(monkeypatch):
    monkeypatch.setattr(built.shutil, "which", lambda _: None)
    assert choose(FULL, "cpu", "compiled") == choose(FULL) == ("eager", "no C++ compiler")


def test_a_device_without_kernels_of_its_own_takes_torch_compile():
    assert choose(FULL, "xpu", "compiled") == ("compiled", "torch.compile")
    assert type(backend_for(FULL, "xpu", "compiled")).__name__ == "Compiled"


def test_triton_needs_a_device_that_it_can_serve(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"slime_ext\.backend: expected a CUDA device and triton"):
        choose(FULL, "cpu", "triton")


def test_the_key_is_checked_where_configurations_are_read():
    assert read_config({"preset": "token_tis", "backend": "compiled"}).backend == "compiled"
    with pytest.raises(ConfigError, match=r"slime_ext\.backend: expected one of .* did you mean 'compiled'"):
        read_config({"preset": "token_tis", "backend": "compile"})


def test_the_same_backend_for_the_same_question():
    assert backend_for(FULL, "cpu", "eager") is backend_for(FULL, "cpu", "eager")


def test_start_up_says_what_is_settled_eagerly():
    assert describe(presets.get("m2")).endswith("; what couples samples is settled eagerly)")

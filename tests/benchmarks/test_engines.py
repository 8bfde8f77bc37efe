"""The table of what engines record: judged on answers that are made here, and the same in the docs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.engines import dumps, healthy, model, page
from benchmarks.engines.model import Answer, Trainer
from benchmarks.engines.rows import Row, row_of
from benchmarks.engines.settings import SETTINGS
from tests.pages import DOCS

RESULTS = Path(dumps.__file__).with_name("RESULTS.md")
PAGE = (DOCS / "engines.md").read_text()


def test_the_page_has_the_recorded_table():
    assert page.table(page.read()) in PAGE
    assert page.versions(page.read()) in PAGE


def test_the_page_has_the_recorded_k3():
    assert healthy.table(healthy.read(), with_parts=False) in PAGE


def test_the_page_has_the_recorded_dumps():
    assert dumps.table(dumps.read()) in RESULTS.read_text()
    assert dumps.read().keys() == dumps.PLANTED.keys()


@pytest.mark.parametrize("name", dumps.PLANTED)
def test_check_says_of_a_launch_what_is_recorded(name):
    assert dumps.said(dumps.PLANTED[name]) == dumps.read()[name].check


def test_every_setting_is_recorded():
    recorded = page.read()
    assert recorded["SGLang"].rows.keys() == SETTINGS.keys()
    for mode in ("raw_logprobs", "processed_logprobs"):
        assert recorded[f"vLLM, {mode}"].rows.keys() == {n for n, s in SETTINGS.items() if not s.is_sglangs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("engines")
    model.write(path / "model")
    return path


@pytest.fixture(scope="module")
def trainer(folder):
    return Trainer(folder / "model")


def answer(trainer, prompt, process, draw):
    """An answer of a perfect engine that samples from `process(logits)`, and records its log-probs."""
    tokens, recorded, whole = [], [], []
    for _ in range(8):
        with torch.no_grad():
            logits = trainer._model(torch.tensor([prompt + tokens])).logits[0, -1]
        values = process(logits).log_softmax(-1)
        token = torch.multinomial(values.exp(), 1, generator=draw).item()
        tokens.append(token)
        recorded.append(values[token].item())
        whole.append(dict(enumerate(values.tolist())))
    return Answer(prompt, tokens, recorded, whole)


def test_a_trainer_adds_what_the_layers_of_an_adapter_compute(folder, trainer):
    model.write_adapter(folder / "adapter", folder / "model", seed=0)
    factors = load_file(folder / "adapter" / "adapter_model.safetensors")
    reply = Answer(model.prompts()[0], [50, 60, 70], [])
    adapted = Trainer(folder / "model", adapter=folder / "adapter").log_probs(reply, 1.0)
    handles = []
    for name, module in trainer._model.named_modules():
        if name.rpartition(".")[2] in model.ADAPTED:
            down, up = (factors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")

            def add(_, inputs, output, down=down, up=up):
                return output + 16 / 8 * inputs[0] @ down.T @ up.T

            handles.append(module.register_forward_hook(add))
    expected = trainer.log_probs(reply, 1.0)
    for handle in handles:
        handle.remove()
    assert len(handles) == 6
    assert torch.allclose(adapted, expected, atol=1e-4)
    assert (trainer.log_probs(reply, 1.0) - expected).abs().mean() > 0.5


def keep_20(logits):
    return logits.masked_fill(logits < logits.topk(20).values[-1], -torch.inf)


@pytest.mark.parametrize(
    ("setting", "process", "in_value", "is_renormalised", "has_ratio"),
    [
        ("plain", lambda logits: logits, False, False, False),
        ("temperature", lambda logits: logits / 0.7, True, False, False),
        ("temperature", lambda logits: logits, False, False, True),
        ("top_k", keep_20, True, True, True),
        ("top_k", lambda logits: logits, False, False, False),
    ],
)
def test_a_row_says_what_the_engine_did(
    setting, process, in_value, is_renormalised, has_ratio, trainer, folder
):
    draw = torch.Generator().manual_seed(0)
    answers = [answer(trainer, prompt, process, draw) for prompt in model.prompts()[:16]]
    row = row_of(SETTINGS[setting], answers, trainer, folder)
    assert (row.in_value, row.is_renormalised, row.ratio > 0) == (in_value, is_renormalised, has_ratio)


def test_values_that_do_not_add_up_to_1_are_not_renormalised(trainer, folder):
    draw = torch.Generator().manual_seed(0)
    answers = []
    for prompt in model.prompts()[:8]:
        plain = answer(trainer, prompt, lambda logits: logits, draw)
        steps = [{t: v if t < 200 else -torch.inf for t, v in step.items()} for step in plain.whole]
        answers.append(replace(plain, whole=steps))
    assert not row_of(SETTINGS["top_k"], answers, trainer, folder).is_renormalised


ROW = Row(in_value=True, is_renormalised=False, ratio=0.1, findings=("penalties",))


@pytest.mark.parametrize(
    ("changed", "agrees"),
    [
        (Row(True, False, 0.15, ("penalties",)), True),
        (Row(True, False, 0.3, ("penalties",)), False),
        (Row(True, False, 0.0, ("penalties",)), False),
        (Row(False, False, 0.1, ("penalties",)), False),
        (Row(True, True, 0.1, ("penalties",)), False),
        (Row(True, False, 0.1, ()), False),
        (Row(True, False, 0.1, ("penalties",), ends=True), False),
    ],
)
def test_rows_agree_up_to_random_answers(changed, agrees):
    assert ROW.agrees(changed) is agrees


DUMPS = dumps.Row(("warns: a",), (), ("penalties",), 1e-4, 1e-2)


@pytest.mark.parametrize(
    ("changes", "agrees"),
    [
        ({"k3": 2e-2}, True),
        ({"k3": 3e-2}, False),
        ({"check": ()}, False),
        ({"healthy": ("penalties",)}, False),
        ({"analyze": ()}, False),
    ],
)
def test_two_dumps_agree_up_to_random_answers(changes, agrees):
    assert DUMPS.agrees(replace(DUMPS, **changes)) is agrees

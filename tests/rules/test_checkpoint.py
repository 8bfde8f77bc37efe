"""What a rule reads of the generation_config.json of a launch's model."""

from __future__ import annotations

import json

import pytest

from slime_ext.rules.judge import RULES
from tests.rules.launches import CHECKPOINT, setup_of

THEIR_GENERATE = {"custom_generate_function_path": "my.generate"}
SETTINGS = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p")
IDLE = '{"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1, "top_k": -1, "min_p": 0.0}'


@pytest.mark.parametrize("text", ['{"temperature": 1.0, "eos_token_id": [1, 2]}', "[1]", "[1", "", IDLE])
def test_a_checkpoint_without_sampling_settings_is_no_matter(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    setup = setup_of(hf_checkpoint=str(tmp_path), **THEIR_GENERATE)
    assert RULES["sampling_of_checkpoint"].judge(setup) is None


def test_a_value_of_the_checkpoint_is_not_shown():
    setup = setup_of(**CHECKPOINT, **THEIR_GENERATE)
    line = RULES["sampling_of_checkpoint"].judge(setup)
    assert "temperature, top_p, top_k" in line and "0.6" not in line


def test_each_setting_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(dict.fromkeys(SETTINGS, 0.5)))
    line = RULES["sampling_of_checkpoint"].judge(setup_of(hf_checkpoint=str(tmp_path), **THEIR_GENERATE))
    assert f"sets {', '.join(SETTINGS)}: SGLang" in line


@pytest.mark.parametrize("more", [0, 1])
def test_a_file_that_is_too_large_is_not_read(tmp_path, more):
    text = '{"temperature": 0.5}'
    (tmp_path / "generation_config.json").write_text(text + " " * (2**16 - len(text) + more))
    line = RULES["sampling_of_checkpoint"].judge(setup_of(hf_checkpoint=str(tmp_path), **THEIR_GENERATE))
    assert (line is None) == bool(more)


def test_without_a_checkpoint_the_working_directory_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    monkeypatch.chdir(tmp_path)
    assert RULES["sampling_of_checkpoint"].judge(setup_of(**THEIR_GENERATE)) is None

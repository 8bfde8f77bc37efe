"""What a rule reads of the generation_config.json of a launch's model."""

from __future__ import annotations

import pytest

from slime_ext.rules.judge import RULES
from tests.rules.launches import CHECKPOINT, setup_of


@pytest.mark.parametrize("text", ['{"temperature": 1.0, "eos_token_id": [1, 2]}', "[1]", "[1", ""])
def test_a_checkpoint_without_sampling_settings_is_no_matter(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    setup = setup_of(hf_checkpoint=str(tmp_path), custom_generate_function_path="my.generate")
    assert RULES["sampling_of_checkpoint"].judge(setup) is None


def test_a_value_of_the_checkpoint_is_not_shown():
    setup = setup_of(**CHECKPOINT, custom_generate_function_path="my.generate")
    line = RULES["sampling_of_checkpoint"].judge(setup)
    assert "temperature, top_p, top_k" in line and "0.6" not in line

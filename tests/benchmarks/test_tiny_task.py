"""The small task: the shipped bytes, held-out prompts never trained on, one token per character."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import tiny_task as tiny

SHIPPED = Path(__file__).parents[2] / "configs" / "tiny"


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_the_shipped_files_are_what_the_generator_writes(tmp_path):
    tiny.write_all(tmp_path)
    assert files(tmp_path) == files(SHIPPED)


def test_the_shipped_files_are_small():
    assert sum(map(len, files(SHIPPED).values())) < 100_000


def test_held_out_prompts_are_new():
    train, heldout = tiny.prompts(tiny.Task(alphabet=3, length=4, train=70, heldout=11))
    assert len(set(train)) == 70
    assert len(set(heldout)) == 11
    assert not set(train) & set(heldout)


def test_transformers_builds_the_model(tmp_path):
    from transformers import AutoConfig

    tiny.write_all(tmp_path, model=tiny.Model(layers=3, hidden=32))
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("qwen3", 3, 32)
    assert config.vocab_size == 16


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(directory, ">abcd")
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", ["abcd>", "", "dd>a", "a"])
def test_text_survives_both_ways(saved, text):
    ids = saved.encode(text)
    assert len(ids) == len(text)
    assert saved.decode(ids) == text


def test_special_tokens_are_known_and_can_be_skipped(saved):
    assert (saved.pad_token_id, saved.bos_token_id, saved.eos_token_id) == (0, 1, 2)
    assert saved.decode([4, 2]) == "a<eos>"
    assert saved.decode([4, 2], skip_special_tokens=True) == "a"


def test_an_unknown_character_is_refused(saved):
    with pytest.raises(Exception, match="UNK"):
        saved.encode("az")


@pytest.mark.parametrize(("characters", "size"), [("", 8), ("abcde", 8), ("abcdef", 16)])
def test_the_vocabulary_divides_by_eight(characters, size):
    assert len(tiny.vocabulary(characters)) == len(set(tiny.vocabulary(characters))) == size


def test_a_character_twice_is_refused():
    with pytest.raises(ValueError, match="expected each once"):
        tiny.vocabulary("aa")

"""One token per character, in the files that Hugging Face reads."""

from __future__ import annotations

import pytest

from slime_ext.launcher.task import tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(directory, ">abcd")
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
    assert len(tokenizer.vocabulary(characters)) == len(set(tokenizer.vocabulary(characters))) == size


def test_a_character_twice_is_refused():
    with pytest.raises(ValueError, match="expected each once"):
        tokenizer.vocabulary("aa")

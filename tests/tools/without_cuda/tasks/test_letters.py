"""The letters: prompts, tokenizer, a model that the host's flags describe."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from slime_ext.tools.without_cuda.tasks import letters


def test_held_out_rows_are_others_than_those_to_train_on():
    train, heldout = letters.prompts()
    texts = {row["input"] for row in train}
    assert (len(texts), len(heldout)) == (letters.TRAIN, letters.HELDOUT)
    assert not texts & {row["input"] for row in heldout}
    assert all(row["input"] == row["label"] + ">" for row in train + heldout)


def test_what_the_example_launches_with_is_what_is_written(tmp_path):
    """configs/tiny, for examples/rehearse_tiny.sh."""
    letters.write_prompts(tmp_path, *letters.prompts())
    letters.write_config(tmp_path / "model")
    files = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*") if path.is_file()}
    shipped = Path(__file__).parents[4] / "configs/tiny"
    assert {path: (shipped / path).read_text() for path in files} == {
        k: v.read_text() for k, v in files.items()
    }


def test_every_letter_is_a_token_and_nothing_is_added(tmp_path):
    from transformers import AutoTokenizer

    letters.write_config(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("dcba>")["input_ids"]
    assert ids == [letters.vocabulary().index(letter) for letter in "dcba>"]
    assert tokenizer.decode(ids) == "dcba>"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.decode([4, 2], skip_special_tokens=True) == "a"
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("az")


def test_the_flags_are_those_of_the_model():
    of = dict(itertools.pairwise(letters.MODEL))
    pairs = {
        "--num-layers": "num_hidden_layers",
        "--hidden-size": "hidden_size",
        "--vocab-size": "vocab_size",
        "--ffn-hidden-size": "intermediate_size",
        "--kv-channels": "head_dim",
    }
    assert {flag: int(of[flag]) for flag in pairs} == {f: letters.CONFIG[key] for f, key in pairs.items()}
    assert letters.CONFIG["vocab_size"] == len(letters.vocabulary())


def test_a_seed_is_a_model(tmp_path):
    from safetensors.torch import load_file

    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        letters.write_model(tmp_path / name, seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(a[key].equal(b[key]) for key in a) and not a["lm_head.weight"].equal(c["lm_head.weight"])

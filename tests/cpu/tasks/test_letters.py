"""The letters: prompts, tokenizer, a model that the host's flags describe."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from slime_ext.config.files import of_package
from slime_ext_cpu.tasks import letters

TINY = of_package(letters.TINY)


def test_held_out_rows_are_others_than_those_to_train_on():
    train, held_out = (
        [json.loads(line) for line in (TINY / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    texts = {row["input"] for row in train + held_out}
    assert (len(train), len(held_out), len(texts)) == (2048, 128, 2048 + 128)
    assert all(row["input"] == row["label"] + ">" for row in train + held_out)


def test_every_letter_is_a_token_and_nothing_is_added():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    assert tokenizer("dcba>")["input_ids"] == [7, 6, 5, 4, 3] and tokenizer.decode([7, 6, 5, 4, 3]) == "dcba>"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.decode([4, 2], skip_special_tokens=True) == "a"
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("az")


def test_the_flags_are_those_of_the_model():
    of, config = dict(itertools.pairwise(letters.MODEL)), json.loads((TINY / "model/config.json").read_text())
    pairs = {
        "--num-layers": "num_hidden_layers",
        "--hidden-size": "hidden_size",
        "--vocab-size": "vocab_size",
        "--ffn-hidden-size": "intermediate_size",
        "--kv-channels": "head_dim",
    }
    assert {flag: int(of[flag]) for flag in pairs} == {flag: config[key] for flag, key in pairs.items()}


def test_a_seed_is_a_model_without_a_row_of_zeros(tmp_path):
    from safetensors.torch import load_file

    folders = [letters.write(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    a, b, c = (load_file(Path(folder, "model.safetensors")) for folder in folders)
    assert all(a[key].equal(b[key]) for key in a) and not a["lm_head.weight"].equal(c["lm_head.weight"])
    assert a["model.embed_tokens.weight"].float().std(1).min() > 0.01

"""Prompts: every line checked, slime's order, the same order after a resume."""

from __future__ import annotations

import random
from argparse import Namespace

import pytest

from slime_ext.errors import DataError
from slime_ext.launcher.task.prompts import Prompt, PromptDataset, read_prompts

FIVE = [Prompt(str(i)) for i in range(5)]


def texts(prompts) -> list[str]:
    return [prompt.text for prompt in prompts]


def slimes_order(size: int, seed: int, epochs: int) -> list[str]:
    """slime's RolloutDataSource: the file's order, shuffled by the global generator of seed + epoch."""
    taken = []
    for epoch in range(epochs):
        random.seed(seed + epoch)
        order = list(range(size))
        random.shuffle(order)
        taken += [str(i) for i in order]
    return taken


@pytest.mark.parametrize("batch", [1, 3, 5, 7, 12])
@pytest.mark.parametrize("seed", [0, 42])
def test_the_order_is_slimes(batch, seed):
    data = PromptDataset(FIVE, seed=seed, shuffle=True)
    taken = [text for _ in range(4) for text in texts(data.next_batch(batch))]
    assert taken == slimes_order(5, seed, 10)[: 4 * batch]


def test_without_shuffle_it_is_the_files_order():
    assert texts(PromptDataset(FIVE).next_batch(7)) == list("0123401")


def test_group_indices_count_over_the_run():
    data = PromptDataset(FIVE, shuffle=True)
    assert [p.group_index for _ in range(3) for p in data.next_batch(4)] == list(range(12))


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 13])
def test_a_resumed_run_sees_the_same_prompts(taken):
    first, second = (PromptDataset(FIVE, seed=1, shuffle=True) for _ in range(2))
    first.next_batch(taken)
    second.load_state_dict(first.state_dict())
    assert second.next_batch(11) == first.next_batch(11)


def test_another_file_is_refused_on_resume():
    state = PromptDataset(FIVE).state_dict() | {"sample_offset": 6}
    with pytest.raises(DataError, match="got 5 prompts and position 6"):
        PromptDataset(FIVE).load_state_dict(state)


def test_lines_become_prompts(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"q": "a>", "a": "b", "metadata": {"x": 1}}\n\n{"q": "c>", "a": "\u2028"}\n', encoding="utf-8"
    )
    assert read_prompts(file, "q", "a") == [
        Prompt("a>", "b", {"x": 1}, 1),
        Prompt("c>", "\u2028", {}, 3),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected at least one prompt"),
        (b'{"input": "a"}\n[1]\n', ":2: expected a JSON object, got a list"),
        (b'{"input": "a"}\nno\n', ":2: expected a JSON object, got 'no'"),
        (b'{"text": "a"}\n', ":1: expected the key 'input' of --input-key, got 'text'"),
        (b'{"input": ""}\n', ":1: expected text under 'input', got ''"),
        (b'{"input": "a", "metadata": 1}\n', ":1: expected a mapping under 'metadata'"),
        (b"\xff\n", "got bytes that are no UTF-8"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, said):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"p\.jsonl") as error:
        read_prompts(tmp_path / "p.jsonl")
    assert said in str(error.value)


def test_long_prompts_are_left_out_as_in_slime(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"input": "ab"}\n{"input": "abc"}\n')
    tokenizer = Namespace(encode=lambda text, add_special_tokens: list(text))
    args = Namespace(
        prompt_data=tmp_path / "p.jsonl", input_key="input", label_key=None,
        rollout_max_prompt_len=2, rollout_seed=0, rollout_shuffle=False,
    )  # fmt: skip
    assert texts(PromptDataset.from_args(args, tokenizer).next_batch(2)) == ["ab", "ab"]
    assert len(PromptDataset.from_args(args)) == 2

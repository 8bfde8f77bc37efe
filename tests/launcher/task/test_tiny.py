"""The small task: made again byte for byte, held-out prompts never trained on, labels that are right."""

from __future__ import annotations

from pathlib import Path

from slime_ext.launcher.task import tiny

SHIPPED = Path(__file__).parents[3] / "configs" / "tiny"


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

"""A model trained on examples until it solves a share of the prompts: where the runs of a seed start.

    python -m benchmarks.evidence.warm --config FLAGS.yaml --until 0.5 --lr 1e-3 --out DIR

The model is the launcher's, on Megatron. An example is a sample with advantage 1 whose proximal policy is the
trained one: the gradient of its policy loss is that of -log pi, averaged over the answer. The same flags and
seed give the same weights. DIR is a directory for --hf-checkpoint; solved.json in it says how far it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from slime_ext.errors import DataError
from slime_ext.launcher.arguments import parse_args
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.model import build_model
from slime_ext.launcher.megatron.optimizer import build_optimizer
from slime_ext.launcher.megatron.step import Trainer
from slime_ext.launcher.megatron.weights import gather_hf_state
from slime_ext.launcher.rollout.weight_sync import write_weights
from slime_ext.launcher.task.prompts import Prompt, PromptDataset
from slime_ext.launcher.training_data import TrainSample
from slime_ext.launcher.validation import validate

EXAMPLES, PROBED, EVERY, MOST = 64, 128, 20, 20_000  # a step; prompts looked at; steps between looks; steps
FLAGS = {
    "--rollout-batch-size": EXAMPLES,
    "--n-samples-per-prompt": 1,
    "--num-steps-per-rollout": 1,
    "--micro-batch-size": EXAMPLES,
    "--num-rollout": MOST,
    "--entropy-coef": 0,
    "--lr-decay-style": "constant",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="flags of the runs")
    parser.add_argument("--until", type=float, required=True, help="mean probability of a right answer")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    words = [str(word) for pair in FLAGS.items() for word in pair] + ["--lr", str(given.lr)]
    with tempfile.TemporaryDirectory() as scratch:
        args = validate(parse_args(["--config", str(given.config), *words, "--run-dir", scratch]))
        parallel.initialize(args, f"file://{scratch}/ranks")
        try:
            solved, steps = train(args, given.until, given.out)
        finally:
            parallel.destroy()
    between = sum(0.2 <= share <= 0.8 for share in solved) / len(solved)
    print(
        f"{steps} steps: right {sum(solved) / len(solved):.3f}, {between:.0%} of prompts between 0.2 and 0.8"
    )


def train(args: argparse.Namespace, until: float, out: Path) -> tuple[list[float], int]:
    """Trains and writes `out`; the probability of each probed prompt's right answer, and the steps taken.

    Raises:
        DataError: the share was not reached.
    """
    config, tokenizer = AutoConfig.from_pretrained(args.hf_checkpoint), _Tokenizer(args.hf_checkpoint)
    chunks = build_model(args, config)
    trainer, data = Trainer(args, chunks, build_optimizer(args, chunks)), PromptDataset.from_args(args)
    probe = tokenizer.examples(PromptDataset.from_args(args).next_batch(PROBED))
    for step in range(MOST):
        if step % EVERY == 0:
            log_probs = trainer.proximal(trainer.cut(probe))
            solved = [float(values.sum().exp()) for values in log_probs.values()]
            if sum(solved) / len(solved) >= until:
                draft = write_weights(gather_hf_state(chunks, config), args.hf_checkpoint, out.parent, step)
                (draft / "solved.json").write_text(json.dumps({"steps": step, "solved": solved}))
                shutil.rmtree(out, ignore_errors=True)
                draft.rename(out)
                return solved, step
        batch = trainer.cut(tokenizer.examples(data.next_batch(EXAMPLES)))
        trainer.train_step(batch[0], {}, step)
    raise DataError(
        f"{out}: expected {until} of the answers right within {MOST} steps, got fewer: raise --lr"
    )


class _Tokenizer:
    """Prompts and their labels to samples of the trainer."""

    def __init__(self, directory: str) -> None:
        self._of = AutoTokenizer.from_pretrained(directory)

    def examples(self, prompts: Sequence[Prompt]) -> list[TrainSample]:
        """The right answers, each with advantage 1."""
        return [self._example(place, prompt) for place, prompt in enumerate(prompts)]

    def _example(self, place: int, prompt: Prompt) -> TrainSample:
        ask, label = (self._of.encode(text, add_special_tokens=False) for text in (prompt.text, prompt.label))
        answer = [*label, self._of.eos_token_id]
        return TrainSample(
            position=place,
            rollout_id=place,
            tokens=ask + answer,
            response_length=len(answer),
            loss_mask=[1] * len(answer),
            rollout_log_probs=[0.0] * len(answer),
            advantage=1.0,
            mask_sum=float(len(answer)),
        )


if __name__ == "__main__":
    main()

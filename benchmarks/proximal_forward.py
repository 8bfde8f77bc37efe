"""What the proximal forward pass costs: decoupled PPO against the bypass, interleaved in one process.

    python -W ignore -m benchmarks.proximal_forward [--samples 512 --steps 4 --rounds 9]

Both train the model of configs/tiny on the same random rollout; ``--use-rollout-logprobs`` anchors the ratio
at the sampler's log-probs and skips the pass. Prints the median seconds of the trainer's part of a rollout.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from transformers import AutoConfig

from slime_ext.launcher.arguments import parse_args
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.model import build_model
from slime_ext.launcher.megatron.optimizer import build_optimizer
from slime_ext.launcher.megatron.step import Trainer
from slime_ext.launcher.training_data import TrainSample, needs_proximal_forward

Taken = TypeVar("Taken")
PARALLEL = ("tensor_model", "pipeline_model", "context")
MODES = {"decoupled": [], "bypass": ["--use-rollout-logprobs"]}


def one_rank() -> argparse.Namespace:
    """What ``parallel.initialize`` reads, for a single rank."""
    sizes = dict.fromkeys((f"{name}_parallel_size" for name in PARALLEL), 1)
    return argparse.Namespace(**sizes, seed=0, distributed_timeout_minutes=10)


def rollout(count: int, prompt: int = 5, response: int = 5) -> list[TrainSample]:
    """Random tokens, advantages of both signs."""
    draw = random.Random(0)
    samples = []
    for i in range(count):
        tokens = [draw.randrange(3, 12) for _ in range(prompt + response)]
        sample = TrainSample(
            position=i,
            rollout_id=i,
            tokens=tokens,
            response_length=response,
            loss_mask=[1] * response,
            rollout_log_probs=[-2.0] * response,
        )
        sample.advantage, sample.mask_sum = draw.uniform(-1, 1), float(response)
        samples.append(sample)
    return samples


def trainer(samples: int, steps: int, extra: list[str]) -> Trainer:
    """The tiny model under the flags of its configuration."""
    batch = ["--rollout-batch-size", str(samples), "--rollout-max-response-len", "5"]
    plain = ["--num-steps-per-rollout", str(steps), "--lr", "1e-5", "--lr-decay-style", "constant"]
    model = ["--hf-checkpoint", "configs/tiny/model", "--prompt-data", "configs/tiny/train.jsonl"]
    passes = ["--num-rollout", "1", "--micro-batch-size", str(min(128, samples // steps))]
    args = parse_args([*model, *batch, *plain, *passes, *extra])
    chunks = build_model(args, AutoConfig.from_pretrained(args.hf_checkpoint))
    return Trainer(args, chunks, build_optimizer(args, chunks))


def once(trained: Trainer, samples: list[TrainSample]) -> float:
    """Seconds of one rollout's training."""
    start = time.perf_counter()
    cut = trained.cut(samples)
    proximal = trained.proximal(cut) if needs_proximal_forward(trained.args) else {}
    for index, step in enumerate(cut):
        trained.train_step(step, proximal, index)
    return time.perf_counter() - start


def options(description: str | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args()


def interleaved(
    chosen: argparse.Namespace,
    modes: Iterable[str],
    make: Callable[[str], Trainer],
    once: Callable[[Trainer, list[TrainSample]], Taken],
) -> dict[str, list[Taken]]:
    """What ``once`` says of each mode's trainer, round by round on one random rollout, in this process alone.

    Args:
        make: a mode's trainer.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel.initialize(one_rank())
        trainers = {name: make(name) for name in modes}
        samples = rollout(chosen.samples)
        taken: dict[str, list[Taken]] = {name: [] for name in trainers}
        for index in range(chosen.rounds):
            for name in list(trainers)[:: 1 if index % 2 else -1]:
                taken[name].append(once(trainers[name], samples))
        parallel.destroy()
    return taken


def main() -> None:
    chosen = options(__doc__)

    def make(name: str) -> Trainer:
        return trainer(chosen.samples, chosen.steps, MODES[name])

    times = interleaved(chosen, MODES, make, once)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"decoupled {median['decoupled']:.3f} s, bypass {median['bypass']:.3f} s per rollout of training;")
    print(f"the bypass takes {median['bypass'] / median['decoupled']:.2f} of the time")


if __name__ == "__main__":
    main()

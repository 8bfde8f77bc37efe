"""What the proximal forward pass costs: decoupled PPO against the bypass, interleaved in one process.

    python -W ignore benchmarks/proximal_forward.py [--samples 512 --steps 4 --rounds 9]

Both train the model of configs/tiny on the same random rollout; ``--use-rollout-logprobs`` anchors the ratio
at the sampler's log-probs and skips the pass. Prints the median seconds of the trainer's part of a rollout.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import AutoConfig

from slime_ext.launcher.arguments import parse_args
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.model import build_model
from slime_ext.launcher.megatron.optimizer import build_optimizer
from slime_ext.launcher.megatron.step import Trainer
from slime_ext.launcher.training_data import TrainSample, needs_proximal_forward

MODES = {"decoupled": [], "bypass": ["--use-rollout-logprobs"]}


def rollout(count: int, prompt: int = 5, response: int = 5) -> list[TrainSample]:
    """Random tokens, advantages of both signs."""
    draw = random.Random(0)
    samples = []
    for i in range(count):
        tokens = [draw.randrange(3, 12) for _ in range(prompt + response)]
        sample = TrainSample(i, i, tokens, response, [1] * response, [-2.0] * response)
        sample.advantage, sample.mask_sum = draw.uniform(-1, 1), float(response)
        samples.append(sample)
    return samples


def trainer(samples: int, steps: int, extra: list[str]) -> Trainer:
    """The tiny model under the flags of its configuration."""
    batch = ["--rollout-batch-size", str(samples), "--rollout-max-response-len", "5"]
    plain = ["--num-steps-per-rollout", str(steps), "--lr", "1e-5", "--lr-decay-style", "constant"]
    model = ["--hf-checkpoint", "configs/tiny/model", "--prompt-data", "configs/tiny/train.jsonl"]
    args = parse_args([*model, *batch, *plain, "--num-rollout", "1", "--micro-batch-size", "128", *extra])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        first = argparse.Namespace(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1, seed=0
        )
        parallel.initialize(first)
        trainers = {name: trainer(options.samples, options.steps, extra) for name, extra in MODES.items()}
        samples = rollout(options.samples)
        times: dict[str, list[float]] = {name: [] for name in MODES}
        for index in range(options.rounds):
            for name in list(MODES)[:: 1 if index % 2 else -1]:
                times[name].append(once(trainers[name], samples))
        parallel.destroy()
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"decoupled {median['decoupled']:.3f} s, bypass {median['bypass']:.3f} s per rollout of training;")
    print(f"the bypass takes {median['bypass'] / median['decoupled']:.2f} of the time")


if __name__ == "__main__":
    main()

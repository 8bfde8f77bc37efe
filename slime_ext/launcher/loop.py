"""The training loop, one program on every rank: sample, advantages, proximal forward, steps, weight sync.

Rank 0 talks to the rollout engine and to the disk; its samples are broadcast, the rest is collective.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model
from transformers import AutoConfig, AutoTokenizer

from slime_ext.host import staleness
from slime_ext.host.contract import load_function
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.model import build_model
from slime_ext.launcher.megatron.optimizer import build_optimizer
from slime_ext.launcher.megatron.step import Trainer
from slime_ext.launcher.megatron.weights import gather_hf_state, read_hf_checkpoint
from slime_ext.launcher.output import checkpoint
from slime_ext.launcher.output.dumps import save_rollout, train_dump
from slime_ext.launcher.output.metrics_log import MetricsLog
from slime_ext.launcher.output.progress import RunProgress
from slime_ext.launcher.postprocess import postprocess, rollout_data
from slime_ext.launcher.rollout.sample import RolloutSample
from slime_ext.launcher.sampler import Sampler
from slime_ext.launcher.training_data import needs_proximal_forward, train_samples
from slime_ext.launcher.validation.model import sizes_of


@contextmanager
def timed(seconds: Counter[str], part: str) -> Iterator[None]:
    """Adds the block's wall time to ``perf/<part>_time``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[f"perf/{part}_time"] += time.perf_counter() - start


class Loop:
    """One run on one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank = args, dist.get_rank()
        hf_config = AutoConfig.from_pretrained(args.hf_checkpoint)
        self.hf_config = hf_config
        if args.custom_megatron_init_path:
            load_function(args.custom_megatron_init_path, "--custom-megatron-init-path")(args)
        has_weights = any(Path(args.hf_checkpoint).glob("*.safetensors"))
        get_tensor = read_hf_checkpoint(args.hf_checkpoint) if has_weights else None
        chunks = build_model(args, hf_config, get_tensor)
        self.trainer = Trainer(args, chunks, build_optimizer(args, chunks))
        self.step = self.start = 0
        self.engine_step = -1
        self.lagging: int | None = None
        self.logged_elsewhere = False
        self.sampler = None
        if self.rank == 0:
            self.sampler = Sampler(
                args, AutoTokenizer.from_pretrained(args.hf_checkpoint), hf_config.vocab_size
            )
        if args.load:
            self._load()
        self.writer, self.writing = ThreadPoolExecutor(1), Future()
        self.writing.set_result(None)
        self.log = self.progress = None
        if self.rank == 0:
            self.log = MetricsLog(args.run_path, args.tensorboard_dir, self.start or None)
            self.progress = RunProgress(args.num_rollout, self.start)

    def run(self) -> None:
        """Trains all rollouts that are left, with evaluations, checkpoints and, at the end, the picture."""
        args = self.args
        self._on_rank0(self._wait_for_engine)
        self._first_push()
        if self.start == 0 and not args.skip_eval_before_train:
            self._evaluate(0)
        elif self.start and self._is_evaluated(self.start):
            self._evaluate(self.start, made_up=True)
        for rollout_id in range(self.start, args.num_rollout):
            self._rollout(rollout_id)
            done = rollout_id + 1
            if done == args.num_rollout or (args.save_interval and done % args.save_interval == 0):
                self._save(done)
            if self._is_evaluated(done):
                self._evaluate(done)
        self._push(self.step)
        self._evaluate(args.num_rollout)
        self._on_rank0(self._finish)

    def _wait_for_engine(self) -> None:
        self.progress.note("model built, waiting for the rollout engine")
        self.sampler.client.wait_healthy(self.args.sglang_start_timeout, self.progress.note)

    def _rollout(self, rollout_id: int) -> None:
        args, spent, start = self.args, Counter(), time.perf_counter()
        samples, metrics = self._sample(rollout_id)
        batch = train_samples(args, samples)
        with timed(spent, "pack"):
            steps = self.trainer.cut(batch)
        proximal: dict[int, Any] = {}
        with timed(spent, "proximal_forward"):
            if needs_proximal_forward(args):
                proximal = self.trainer.proximal(steps)
        staleness.set_trainer_version(self.step)  # ages of samples count from it
        postprocess(args, rollout_id, steps, proximal, batch)
        target: dict[int, Any] = {}
        hook = 0.0
        with timed(spent, "train"):
            for step in steps:
                values, log = self.trainer.train_step(step, proximal, self.step, rollout_id)
                self.step += 1
                hook += log.hook_seconds
                target |= log.target
                self._write("step", values, rollout_id)
        if args.save_debug_train_data:
            with timed(spent, "dump"):
                data = rollout_data(args, steps, proximal or target, batch)
                template = args.save_debug_train_data
                self._write_later(train_dump(template, rollout_id, data, str(args.prompt_data)))
        with timed(spent, "weight_sync"):
            if (rollout_id + 1) % args.update_weights_interval == 0:
                self._push(self.step)
        seconds = time.perf_counter() - start
        tokens = sum(s.response_length for s in samples)
        perf = {"perf/hook_time": hook, "perf/step_time": seconds, "perf/tokens_per_s": tokens / seconds}
        shown = {} if self.logged_elsewhere else metrics
        self._write("rollout", {**shown, **spent, **perf}, rollout_id)
        if self.progress:
            self.progress.update(rollout_id + 1, metrics.get("rollout/raw_reward"), tokens / seconds)

    def _sample(self, rollout_id: int) -> tuple[list[RolloutSample], dict[str, float]]:
        box: list[Any] = [None]
        if self.sampler:
            samples, metrics = self.sampler.sample(rollout_id)
            if self.args.save_debug_rollout_data:
                self._write_later(
                    partial(save_rollout, self.args.save_debug_rollout_data, rollout_id, samples)
                )
            self.logged_elsewhere = self._log_rollout(rollout_id, samples, metrics)
            box = [(samples, metrics)]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def _write_later(self, write: Callable[[], Any]) -> None:
        """Calls `write` in another thread; raises here what the call before it raised."""
        self.writing.result()
        self.writing = self.writer.submit(write)

    def _log_rollout(self, rollout_id: int, samples: list[RolloutSample], metrics: dict[str, float]) -> bool:
        """Whether a function of the user's has logged the rollout itself, as slime asks it."""
        path = self.args.custom_rollout_log_function_path
        if not path:
            return False
        function = load_function(path, "--custom-rollout-log-function-path")
        return bool(function(rollout_id, self.args, samples, metrics, metrics["perf/rollout_time"]))

    def _first_push(self) -> None:
        """Pushes the trainer's weights; in a resumed run those that its engine had, if still on disk."""
        runs = (self.args.run_path, Path(self.args.load or self.args.run_path).parent)
        places = [Path(run) / "weights" / f"version_{self.lagging}" for run in runs]
        lagging = next(filter(Path.is_dir, places), None)
        if self.lagging in (None, self.step) or lagging is None:
            return self._push(self.step)
        self.engine_step = self.lagging
        self._on_rank0(lambda: self.sampler.client.update_weights_from_disk(lagging, self.lagging))

    def _push(self, version: int) -> None:
        """Pushes the trainer's weights, unless the engine has them."""
        if self.engine_step == version:
            return
        state = gather_hf_state(self.trainer.chunks, self.hf_config)
        if self.sampler:
            self.sampler.push(state, version)
        self.engine_step = version

    def _is_evaluated(self, done: int) -> bool:
        """Whether an evaluation follows this rollout that is not the last."""
        args = self.args
        return bool(args.eval_interval and done % args.eval_interval == 0 and done < args.num_rollout)

    def _evaluate(self, rollout_id: int, made_up: bool = False) -> None:
        """`made_up`: the evaluation after the checkpoint, unless the killed run had it."""
        args = self.args
        trained = args.eval_trained_weights and (
            self.engine_step != self.step or args.rollout_weight_rounding
        )
        state = gather_hf_state(self.trainer.chunks, self.hf_config) if trained else None

        if self.rank == 0 and not (made_up and self.log.has("eval", self.step)):
            with self.sampler.evaluating(state, self.step):
                values = self.sampler.evaluate() if args.eval_datasets else {}
            if values:
                self.log.log("eval", values, rollout_id=max(rollout_id - 1, 0), step=self.step)
            for name, value in values.items():
                self.progress.note(f"{name} after {rollout_id} rollouts: {value:.3f}")
        dist.barrier()

    def _write(self, kind: str, values: dict[str, float], rollout_id: int) -> None:
        if self.log:
            self.log.log(kind, values, rollout_id=rollout_id, step=self.step)

    def _on_rank0(self, action: Callable[[], None]) -> None:
        if self.rank == 0:
            action()
        dist.barrier()

    def _finish(self) -> None:
        from slime_ext.analysis.run_picture import draw  # matplotlib takes a second to import

        self.writing.result()
        self.progress.close()
        self.log.close()
        draw([self.args.run_path], Path(self.args.run_path) / "report.png")

    def _save(self, rollouts_done: int) -> None:
        payload = {
            "model": unwrap_model(self.trainer.chunks[0]).state_dict(),
            "optimizer": self.trainer.optimizer.state_dict(),
            "step": self.step,
            "engine_step": self.engine_step,
            "data": self.sampler.data_state if self.sampler else None,
        }
        checkpoint.save(
            self.args.save,
            rollouts_done,
            self.rank,
            payload,
            sizes=sizes_of(self.args),
            keep=self.args.save_keep,
            barrier=dist.barrier,
        )

    def _load(self) -> None:
        self.start = self.args.load_iteration
        payload = checkpoint.load(self.args.load, self.start, self.rank)
        unwrap_model(self.trainer.chunks[0]).load_state_dict(payload["model"])
        self.trainer.optimizer.load_state_dict(payload["optimizer"])
        self.step, self.lagging = payload["step"], payload["engine_step"]
        if self.sampler:
            self.sampler.dataset.load_state_dict(payload["data"])


def run(args: argparse.Namespace, store: str) -> None:
    """Joins the process group at `store`, trains, and leaves the group.

    A rank that fails does not leave it: NCCL would wait for the others, which wait for this rank.
    """
    parallel.initialize(args, store)
    loop = Loop(args)
    try:
        loop.run()
    finally:
        loop.writer.shutdown()  # the dump of the rollout that fails is the one to look at
    parallel.destroy()

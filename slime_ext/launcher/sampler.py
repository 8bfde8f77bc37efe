"""What rank 0 does beside training: prompts, the rollout engine, rewards, evaluation, weight push."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_ext.errors import EngineError
from slime_ext.launcher.rollout.client import EngineClient
from slime_ext.launcher.rollout.protocol import SamplingParams, n_dropped
from slime_ext.launcher.rollout.rounding import round_weights
from slime_ext.launcher.rollout.sample import RolloutSample
from slime_ext.launcher.rollout.weight_sync import push_weights
from slime_ext.launcher.task.prompts import Prompt, PromptDataset, read_prompts
from slime_ext.launcher.task.rewards import score

Metrics = dict[str, float]


class Sampler:
    """Samples scored rollouts from a running engine."""

    ahead: Future[tuple[list[RolloutSample], Metrics]] | None = None

    def __init__(self, args: argparse.Namespace, tokenizer: Any, vocab_size: int) -> None:
        self.args, self.tokenizer = args, tokenizer
        self.dataset = PromptDataset.from_args(args, tokenizer)
        self.client = EngineClient(
            args.sglang_server_url,
            concurrency=args.sglang_server_concurrency,
            timeout=args.sglang_request_timeout,
            recovery_timeout=args.engine_patience,
            vocab_size=vocab_size,
        )
        self.thread = ThreadPoolExecutor(1)
        self.data_state: dict[str, Any] = {}

    def push(self, state: dict[str, Any], version: int) -> None:
        """Gives the engine these weights; ``version`` is the trainer's optimizer step."""
        self._wait_for_ahead()
        if rounding := self.args.rollout_weight_rounding:
            state = round_weights(state, rounding)
        directory = Path(self.args.run_path) / "weights"
        push_weights(self.client, state, self.args.hf_checkpoint, directory, version)

    @contextmanager
    def evaluating(self, state: dict[str, Any] | None, version: int) -> Iterator[None]:
        """The engine has these weights, not rounded, and afterwards those that it had; None: no others."""
        self._wait_for_ahead()
        held = self.client.pushed
        if state is not None:
            directory = Path(self.args.run_path) / "weights_evaluated"
            push_weights(self.client, state, self.args.hf_checkpoint, directory, version, keep=1)
        yield
        if state is not None and held is not None:
            self.client.update_weights_from_disk(*held)

    def sample(self, rollout_id: int) -> tuple[list[RolloutSample], Metrics]:
        """A scored rollout of the next prompts, groups one after the other.

        With ``--train-async`` the one after it is begun, with the weights that the engine has now.
        ``data_state`` is where a resumed run continues: before the prompts of that one.
        """
        result = self.ahead.result() if self.ahead else self._sample(rollout_id)
        self.ahead, self.data_state = None, self.dataset.state_dict()
        if self.args.train_async and rollout_id + 1 < self.args.num_rollout:
            self.ahead = self.thread.submit(self._sample, rollout_id + 1)
        return result

    def _wait_for_ahead(self) -> None:
        """Until no rollout is under way: the engine's weights never change within one."""
        if self.ahead:
            self.ahead.result()

    def _sample(self, rollout_id: int) -> tuple[list[RolloutSample], Metrics]:
        args, start = self.args, time.perf_counter()
        samples = self._generate(
            self.dataset.next_batch(args.rollout_batch_size),
            self._params(args.n_samples_per_prompt, args.rollout_max_response_len, args.rollout_temperature),
            f"rollout {rollout_id}",
        )
        for sample in samples:
            sample.rollout_id = sample.index
        self._score(samples)
        seconds = time.perf_counter() - start
        return samples, {**rollout_metrics(samples), "perf/rollout_time": seconds}

    def evaluate(self) -> Metrics:
        """Mean reward of each held-out set under the engine's present weights."""
        args, out = self.args, {}
        params = self._params(
            args.n_samples_per_eval_prompt, args.eval_max_response_len, args.eval_temperature
        )
        for name, path in args.eval_datasets:
            prompts = read_prompts(path, args.input_key, args.label_key)
            samples = self._generate(prompts, params, "evaluation")
            # A dropped one counts as 0.
            out[f"eval/{name}"] = sum(self._score(samples)) / max(len(samples), 1)
        return out

    def _generate(self, prompts: Sequence[Prompt], params: SamplingParams, where: str) -> list[RolloutSample]:
        encode = self.tokenizer.encode
        encoded = [replace(p, ids=tuple(encode(p.text, add_special_tokens=False))) for p in prompts]
        samples = [sample for group in self.client.generate(encoded, params) for sample in group]
        if dropped := n_dropped(samples):
            self._report(dropped, len(samples), where)
        return samples

    def _report(self, dropped: Counter[str], count: int, where: str) -> None:
        """Says what was dropped and why.

        Raises:
            EngineError: that was everything.
        """
        reasons = ", ".join(f"{reason}: {n}" for reason, n in dropped.most_common())
        if dropped.total() == count:
            raise EngineError(
                f"{where}: expected samples to train on, got {count} of {count} dropped ({reasons}): see "
                "sglang.log"
            )
        print(f"slime-ext: {where}: {dropped.total()} of {count} samples dropped ({reasons})", flush=True)

    def _score(self, samples: Sequence[RolloutSample]) -> list[float]:
        """Rewards of the samples that were not dropped; a dropped one has none."""
        return score(self.args, [s for s in samples if not s.remove_sample])

    def _params(self, n: int, longest: int, temperature: float) -> SamplingParams:
        """How responses are drawn, of rollouts and of evaluations."""
        stop = tuple(self.args.rollout_stop_token_ids or ()) or (self.tokenizer.eos_token_id,)
        top = {"top_p": self.args.rollout_top_p, "top_k": self.args.rollout_top_k}
        return SamplingParams(longest, n, temperature, **top, stop_token_ids=stop)


def rollout_metrics(samples: Sequence[RolloutSample]) -> Metrics:
    """Means over the samples that count, of which there is at least one, and how many were dropped."""
    kept = [s for s in samples if not s.remove_sample]

    def mean(of: Callable[[RolloutSample], float]) -> float:
        return sum(of(s) for s in kept) / len(kept)

    return {
        "rollout/raw_reward": mean(lambda s: s.reward),
        "rollout/response_len": mean(lambda s: s.response_length),
        "rollout/truncated": mean(lambda s: s.status == "truncated"),
        "rollout/dropped": float(len(samples) - len(kept)),
    }

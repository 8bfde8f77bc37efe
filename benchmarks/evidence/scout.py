"""A quick look at a setting before the real engines run it: the same model, loss and corrections in torch.

    python -m benchmarks.evidence.scout --out FILE --preset none token_tis --lag 8 --lr 1e-3 [--seed 101 ...]

One process holds trainer and sampler: transformers' Qwen3 of configs/tiny's sizes samples by itself, in
float32, with weights that lag, are rounded, or both. Held-out exact match is computed, not sampled: the mean
probability of the whole right answer. A run takes a quarter of a real one's processor time. It serves to
choose settings on pilot seeds; what is claimed runs on Megatron and SGLang (python -m benchmarks.evidence).
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.tiny_task import Model, Task, model_config, prompts
from slime_ext import presets
from slime_ext.correction import Correction, Tokens
from slime_ext.launcher.rollout.rounding import round_weights
from slime_ext.launcher.training_data import group_advantages
from slime_ext.losses import Bounds
from slime_ext.ops import Segments, surrogates

END, ASK, FIRST = 2, 3, 4  # token ids: end of the answer, end of the prompt, the first symbol


@dataclass(frozen=True)
class Question:
    """What is asked: `length` symbols in, an answer that follows from them out."""

    length: int = 4
    symbols: int = 8
    chain: bool = False
    ends: bool = True

    def pairs(self, numbers: list[list[int]]) -> tuple[Tensor, Tensor]:
        """[N, L + 1] prompts and [N, L + 1] answers, ids."""
        ask = [[FIRST + x for x in row] + [ASK] for row in numbers]
        sums = [list(itertools.accumulate(row)) if self.chain else row for row in numbers]
        return torch.tensor(ask), torch.tensor(
            [[FIRST + x % self.symbols for x in row] + [END] * self.ends for row in sums]
        )

    def texts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Training and held-out questions; those of configs/tiny for its length."""
        if self.length == 4:
            task = Task()
            return tuple([[task.letters.index(c) for c in text] for text in part] for part in prompts(task))
        draw = random.Random(0)
        rows = [[draw.randrange(self.symbols) for _ in range(self.length)] for _ in range(2176)]
        return rows[:2048], rows[2048:]


def build(seed: int) -> Qwen3ForCausalLM:
    """The tiny model with random weights of a seed."""
    config = Qwen3Config(**{**model_config(Model(positions=512), 16), "attn_implementation": "sdpa"})
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            nn.init.normal_(
                weight, std=0.02 / (2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
            )
    return model


@torch.no_grad()
def sample(model: nn.Module, ask: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """[N, length] ids, log-probs and mask of answers drawn at temperature 1."""
    held, ids, found = None, ask, []
    for _ in range(length):
        out = model(input_ids=ids, past_key_values=held, use_cache=True)
        held, log_probs = out.past_key_values, out.logits[:, -1].log_softmax(-1)
        ids = torch.multinomial(log_probs.exp(), 1)
        found.append((ids, log_probs.gather(1, ids)))
    tokens, log_probs = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    ended_before = (tokens == END).cumsum(1) - (tokens == END).long()
    return tokens, log_probs, ended_before == 0


def log_probs_of(model: nn.Module, ask: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """[N, L] log-probs of the answers and the entropy at each place."""
    logits = model(input_ids=torch.cat((ask, answer[:, :-1]), 1)).logits[:, ask.shape[1] - 1 :]
    every = logits.log_softmax(-1)
    return every.gather(2, answer.unsqueeze(2)).squeeze(2), -(every.exp() * every).sum(-1)


def reward(tokens: Tensor, mask: Tensor, answer: Tensor, exact: bool) -> Tensor:
    """[N] share of right places as configs/tiny counts them, or 1 for the whole answer."""
    right = ((tokens == answer) & mask).sum(1)
    if exact:
        return (right == answer.shape[1]).float()
    if END not in answer:
        return right / answer.shape[1]
    ended = ((tokens == END) & mask).any(1).long()
    return right / torch.maximum(mask.sum(1) - ended, torch.tensor(answer.shape[1] - 1)).add(1)


def policy_loss(
    correction: Correction | None, cur: Tensor, prox: Tensor, behavior: Tensor, adv: Tensor, mask: Tensor
) -> Tensor:
    """[N, L] the launcher's loss: PPO's clip, or the correction's own surrogate, weighted."""
    pg = surrogates.ppo_clip(cur - prox, adv, 0.2, 0.28)[0]
    if correction is None:
        return pg
    segments = Segments.whole([mask.shape[1]] * len(mask), mask.flatten().long())
    tokens = Tokens(segments, *(x.flatten() for x in (prox, behavior, cur, adv)))
    loss, _ = correction.loss(correction(tokens), tokens, pg.flatten(), Bounds(0.2, 0.28))
    return loss.view_as(pg)


def run(given: argparse.Namespace, preset: str, seed: int) -> dict:
    """One run; its held-out curve."""
    question = Question(given.length, chain=given.chain, ends=not given.endless)
    train, heldout = question.texts()
    held_ask, held_answer = question.pairs(heldout)
    model, draw = build(seed), random.Random(seed)
    warm_up(model, question, train, given, draw)
    torch.manual_seed(seed + 1)
    correction = None if preset == "none" else presets.get(preset)
    lr = given.lr * (given.cut if preset == "none" else 1.0)
    adam = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    steps, done, behavior_model, curve = given.rollouts * given.steps, 0, None, []
    for rollout in range(given.rollouts):
        if rollout % given.lag == 0:
            behavior_model = copy.deepcopy(model)
            if given.rounding:
                behavior_model.load_state_dict(round_weights(model.state_dict(), given.rounding))
        if rollout % given.eval_every == 0:
            curve.append((done, exact_match(model, held_ask, held_answer)))
        chosen = draw.sample(train, given.prompts)
        ask, answer = (x.repeat_interleave(given.n, 0) for x in question.pairs(chosen))
        tokens, behavior, mask = sample(behavior_model, ask, answer.shape[1])
        adv = torch.tensor(group_advantages(reward(tokens, mask, answer, given.chain).tolist(), given.n))
        with torch.no_grad():
            prox = log_probs_of(model, ask, tokens)[0]
        for part in torch.arange(len(ask)).chunk(given.steps):
            cur, entropy = log_probs_of(model, ask[part], tokens[part])
            a = adv[part].unsqueeze(1).expand_as(cur)
            keep = mask[part]
            loss = policy_loss(correction, cur, prox[part], behavior[part], a, keep) - given.entropy * entropy
            (torch.where(keep, loss, 0).sum(1) / keep.sum(1)).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if given.decay:
                adam.param_groups[0]["lr"] = lr * (1 - done / steps)
            adam.step()
            adam.zero_grad()
            done += 1
    curve.append((done, exact_match(model, held_ask, held_answer)))
    return {"preset": preset, "seed": seed, "end": curve[-1][1], "curve": curve}


def warm_up(
    model: nn.Module, question: Question, train: list, given: argparse.Namespace, draw: random.Random
) -> None:
    """Trains on examples until the mean probability of a right answer is `given.warm`."""
    if not given.warm:
        return
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    ask, answer = question.pairs(train[:128])
    for step in range(20_000):
        log_probs, _ = log_probs_of(model, *question.pairs(draw.sample(train, 64)))
        (-log_probs.mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        if step % 10 == 0 and exact_match(model, ask, answer) >= given.warm:
            return


@torch.no_grad()
def exact_match(model: nn.Module, ask: Tensor, answer: Tensor) -> float:
    """Mean probability of the whole right answer at temperature 1."""
    return round(float(log_probs_of(model, ask, answer)[0].sum(1).exp().mean()), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", nargs="+", default=["none"])
    parser.add_argument("--seed", type=int, nargs="+", default=[101])
    for name, default in {"lag": 1, "length": 4, "rollouts": 64, "prompts": 32, "n": 16, "steps": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--eval-every", type=int, default=4)
    for name, default in {"lr": 1e-3, "entropy": 0.06, "warm": 0.0, "cut": 1.0}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--rounding", choices=("fp8", "fp8_block", "int8", "int4"))
    parser.add_argument("--chain", action="store_true", help="running sums instead of copies")
    parser.add_argument("--endless", action="store_true", help="answers of a fixed length, without an end")
    parser.add_argument("--constant", dest="decay", action="store_false", help="constant learning rate")
    given = parser.parse_args()
    torch.set_num_threads(1)
    setting = {k: v for k, v in vars(given).items() if k not in ("out", "preset", "seed")}
    for seed, preset in itertools.product(given.seed, given.preset):
        began = time.process_time()
        row = {**setting, **run(given, preset, seed), "seconds": round(time.process_time() - began, 1)}
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(preset, seed, row["end"], row["seconds"], [value for _, value in row["curve"]], flush=True)


if __name__ == "__main__":
    main()

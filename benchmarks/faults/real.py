"""The faults planted in SmolLM2-135M-Instruct: real text, bfloat16, training as it goes, slime's dumps.

For each seed the model is trained once (Adam on REINFORCE, policy gradients of sampled answers), and its
weights before each rollout are kept on disk while that seed is worked on. A fault is planted in what lies
between these weights and the dump: the push, the sampler, the log-prob pass, the data's way. Each run becomes
DIR/NAME_SEED.zip; those that are there are not made again.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.faults.cases import FAULTS, HEALTHY, tokenised_again
from benchmarks.faults.harms import of_other_run
from benchmarks.faults.model import BF16, FP8, SMOLLM2, How, Model, Weights, stored
from benchmarks.faults.text import RealText
from benchmarks.faults.world import World, write
from slime_ext_cpu.tasks import sums

ROLLOUTS = 10
SEEDS, HEALTHY_OF_A_SEED = 5, 15
RATES = (3e-5, 6e-5, 4e-5, 5e-5)  # Adam's, by seed
EXACT, NARROW = How(), How(dtype=BF16, native=True)
LONG = 84  # tokens, of responses whose late positions matter


def base(seed: int) -> World:
    """A healthy run; the others differ from it by their fault."""
    return World(
        seed=seed,
        shape=SMOLLM2,
        rollouts=ROLLOUTS,
        samples=16,
        length=14,
        learning=RATES[seed % len(RATES)],
        engine=NARROW,
        trainer=NARROW,
        text=_text(),
    )


@cache
def _text() -> RealText:
    return RealText.of(sums.model())


def first_stage(name: str) -> bool:
    """A push that sends the first of three pipeline stages."""
    return not any(f".layers.{i}." in name for i in range(10, 30))


def without_blank(pair: Tensor) -> int:
    """What two tokens become whose text is encoded again without its blanks."""
    read = _text().tokenizer
    return read(read.decode(pair.tolist()).replace(" ", "") or ".").input_ids[-1]


def other_batch(seed: int, folder: Path) -> None:
    """Training scores samples in another batch, by another kernel, whose products are rounded again. (The
    CPU's own kernels give the same numbers in every batch.)"""
    world, how = base(seed), How(dtype=BF16)
    weights = stored(HISTORY[seed][0], how)
    samples = []
    for row in torch.load(folder / "train_data/0.pt", weights_only=True)["samples"]:
        ids, size = row["tokens"], row["response_lengths"]
        with torch.no_grad():
            logits = Model(world.shape, how)(weights, ids[None, :-1], since=len(ids) - size - 1).logits[0]
        log_probs = logits.log_softmax(-1).gather(1, ids[-size:, None])[:, 0]
        call = {
            "train_log_probs": log_probs,
            "old_log_probs": row["log_probs"],
            "local_loss_mask": row["loss_masks"],
        }
        samples.append(call | {"rollout_log_probs": row["rollout_log_probs"]})
    (folder / "policy_loss_debug").mkdir()
    torch.save({"samples": samples}, folder / "policy_loss_debug/rank_0_call_0.pt")


# Faults of a mixture of experts, which the model is not.
ABSENT = {"expert_routing", "routing_flips"}
SHORT = 4  # rollouts of faults that do not depend on how far training has come
# What a fault's world has of its own here; the rest is that of the toy world.
OWN: dict[str, dict] = {
    "partial_push": {"pushed": first_stage},
    "growing_mismatch": {"stops": 3},
    "layer": {"engine": replace(NARROW, eps={1: 1.0})},
    "kv_precision": {"length": LONG, "engine": replace(NARROW, cache=FP8, cache_from=64), "rollouts": 2},
    "position_drift": {"length": LONG, "rollouts": 2, "penalty": 0.6},
    "quantised": {"engine": replace(NARROW, bits=4, group=32)},
    "retokenised": {"length": 48, "rollouts": 2},
    "tool_tokens": {"length": 48, "rollouts": 2},
    "prefix_mismatch": {"length": 36, "rollouts": 3},
    "selection_bias": {"most": 19, "length": 20, "rollouts": 8, "samples": 24},
    "stale_weights": {"rollouts": ROLLOUTS},
    "stale_prefix": {"rollouts": ROLLOUTS},
    "stale_cache": {"rollouts": ROLLOUTS, "gap": 6},
}
LASTING = {"frozen_sampler", "partial_push", "growing_mismatch", "resumed_wrong_weights"}
# More mechanisms than detectors: name -> world's own, beside the finding's name.
MORE: dict[str, tuple[str, dict]] = {
    "growing_noise": ("growing_mismatch", {"noise": 0.004, "rollouts": 8}),
    "fp8_cache": ("quantised", {"engine": replace(NARROW, cache=FP8), "rollouts": SHORT}),
    "int4_late": ("quantised", {"engine": replace(NARROW, bits=4, group=32), "rollouts": SHORT, "first": 30}),
    "held": ("stale_weights", {"interval": 100, "rollouts": ROLLOUTS}),
    "int8": ("quantised", {"engine": replace(NARROW, bits=8), "rollouts": 3}),
    "rounded_push": ("growing_mismatch", {"trainer": EXACT, "rollouts": 6}),
    "interval": ("stale_weights", {"interval": 4, "rollouts": ROLLOUTS}),
    "stale_shifted": ("off_by_one", {"late": 3, "rollouts": ROLLOUTS, "spoil": FAULTS["off_by_one"].spoil}),
}
# What such a run is besides.
BOTH = {"stale_shifted": ("stale_weights",)}


def world_of(name: str, seed: int) -> World:
    """The world of a fault in the real model."""
    here = base(seed)
    if name in MORE:
        return replace(here, **MORE[name][1])
    toy = FAULTS[name]
    sizes = "seed shape samples length learning engine trainer text".split()
    real = {field: getattr(here, field) for field in sizes}
    real["rollouts"] = ROLLOUTS if name in LASTING else min(toy.rollouts, SHORT)
    world = replace(toy, **real | OWN.get(name, {}))
    text = here.text
    if name == "reward_collapse":  # whose reward is high from the start
        world = replace(world, rollouts=ROLLOUTS, text=replace(text, kinds=("fact",)))
    if name == "retokenised":
        world = replace(world, spoil=partial(tokenised_again, merged=without_blank))
    if name == "batch_shape":
        world = replace(world, harm=partial(other_batch, seed))
    if name == "selection_bias":
        world = replace(world, text=replace(text, kinds=("fact", "fact", "sum")))
    if name == "other_run":
        world = replace(world, harm=_other(world))
    if world.length > 24:
        world = replace(world, text=replace(text, end=None, kinds=("story", "words")))
    return world


def _other(world: World):
    other = replace(world, seed=world.seed + 1000)
    return of_other_run(lambda folder: write(other, folder, HISTORY[world.seed], MEMO[world.seed]))


def healthy(number: int, seed: int) -> World:
    """A run without a fault: size, text, temperature, precision and lag follow from its number."""
    g = torch.Generator().manual_seed(7000 + 100 * seed + number)

    def one_of(*values):
        return values[int(torch.randint(len(values), (1,), generator=g))]

    here = base(seed)
    temperature = one_of(1.0, 1.0, 1.0, 0.7, 1.2)
    rollouts = (1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 3, 4, 6, 8, ROLLOUTS)[number % 15]
    kinds = one_of(here.text.kinds, here.text.kinds, ("sum",), ("story",), ("sum", "words"))
    top_p = one_of(1.0, 1.0, 1.0, 0.95)
    length = one_of(8, 14, 14, 20)
    sides = one_of((NARROW, NARROW), (NARROW, NARROW), (NARROW, How(dtype=BF16)), (EXACT, EXACT))
    return replace(
        here,
        seed=7000 + 100 * seed + number,
        rollouts=rollouts,
        samples=one_of(12, 16, 24) if rollouts < 6 else 12,
        length=length,
        text=replace(here.text, kinds=kinds),
        engine=sides[0],
        trainer=sides[1],
        temperature=temperature,
        score_temperature=temperature,
        top_p=top_p,
        replays="trainer" if top_p < 1 else "",
        late=one_of(0, 0, 0, 1) * (here.learning <= 3e-5),  # a lag that does no harm
        first=one_of(0, 0, 100),
        reference=one_of(False, True),
        entropy=one_of(False, True) and top_p == 1,
        versions=one_of(True, True, False),
        turns=1,
    )


class Trajectory:
    """The trainer's weights before each rollout, on disk; what is appended is written there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if not len(self):
            from safetensors.torch import load_file

            read = load_file(sums.model() / "model.safetensors")
            self.append({name: w.float() for name, w in read.items()})

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.pt"

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob("*.pt"))

    def __getitem__(self, number: int) -> Weights:
        return torch.load(self._path(number), mmap=True, weights_only=True)

    def append(self, weights: dict[str, Tensor]) -> None:
        """Writes the weights before the next rollout."""
        part = self.folder / "part"
        torch.save(weights, part)
        part.rename(self._path(len(self)))


HISTORY: dict[int, Trajectory] = {}
MEMO: dict[int, dict] = {}
NAMES = (*(name for name in FAULTS if name not in ABSENT), *MORE)


def make(out: Path, only: list[str] | None, seed: int | None) -> str:
    """Makes the runs that are not there; returns what to do with them."""
    out.mkdir(parents=True, exist_ok=True)
    for number in range(SEEDS) if seed is None else [seed]:
        runs = _runs(number, only)
        todo = [(name, world) for name, world in runs if not _zip(out, name, number).exists()]
        if todo:
            _make(number, todo, out)
    return f"python -m benchmarks.faults figures --out {out}"


def _runs(seed: int, only: list[str] | None) -> Iterator[tuple[str, World]]:
    for name in NAMES:
        if not only or name in only:
            yield name, world_of(name, seed)
    if not only or HEALTHY in only:
        for number in range(HEALTHY_OF_A_SEED):
            yield f"{HEALTHY}-{number}", healthy(number, seed)


def _zip(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}_{seed}.zip"


def _make(seed: int, todo: list[tuple[str, World]], out: Path) -> None:
    folder = out / f"weights_{seed}"
    if len(list(folder.glob("*.pt"))) < ROLLOUTS:  # Adam's moments are not kept: from the start
        shutil.rmtree(folder, ignore_errors=True)
    HISTORY[seed], MEMO[seed] = Trajectory(folder), {}
    with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as scratch:
        write(base(seed), Path(scratch) / "base", HISTORY[seed], MEMO[seed])
        for name, world in todo:
            begin = time.time()
            made = write(world, Path(scratch) / name, HISTORY[seed], MEMO[seed])
            shutil.make_archive(str(_zip(out, name, seed).with_suffix("")), "zip", made)
            shutil.rmtree(made)
            print(f"{name}_{seed}: {time.time() - begin:.0f} s", flush=True)
    shutil.rmtree(folder)
    del HISTORY[seed], MEMO[seed]

"""A rollout as slime's trainer holds it, in any release and layout, and what it trains on: for the step plan.

``samples`` are oracle sequences with what slime knows of a sample beside them. ``data_of`` makes one rank's
``rollout_data``; ``train`` runs the postprocess function and every micro-batch's hook call on it, and divides
as slime does.
"""

from __future__ import annotations

import random
import statistics
from types import SimpleNamespace

import torch

from slime_ext import tis
from slime_ext.config.load import read_config
from slime_ext.host import step_metrics
from slime_ext.host.ranks import ranks
from slime_ext.host.rollout_data import Samples, read_ahead
from slime_ext.host.step_plan import compute_plan
from tests import oracle
from tests.slices import slice_response

GROUP, PROMPTS, STEPS = 4, 4, 2
LISTS = ("proximal", "behavior", "advantage", "host_loss")


def arguments(mapping, **more):
    given = {
        "use_tis": True,
        "slime_ext": mapping,
        "custom_tis_function_path": "slime_ext.tis.correct",
        "n_samples_per_prompt": GROUP,
        "rollout_batch_size": PROMPTS,
        "global_batch_size": GROUP * PROMPTS // STEPS,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "calculate_per_token_loss": False,
    }
    return SimpleNamespace(**given | more)


def samples(seed=0, *, split=True):
    """16 rollouts of 4 prompts: ragged, some off, one fully masked, one of which is two samples."""
    rng = random.Random(seed)
    out = []
    for index in range(GROUP * PROMPTS):
        for _ in range(2 if split and index == 5 else 1):
            length = 1 if index == 2 else rng.randint(2, 30)
            s = oracle.random_sequence(rng, length, rng.choice([0.005, 0.05, 0.4]), wild=False)
            s |= {"index": index, "rollout": index, "prompt": rng.randint(1, 9)}
            s["mask"] = [0] * length if index == 7 else s["mask"]
            s["reward"] = float(rng.random() < 0.5)
            out.append(s)
    for position, s in enumerate(out):
        s["position"] = position
    baseline(out)
    return out


def baseline(rollout):
    """slime's GRPO rewards, which are its advantages."""
    for group in range(PROMPTS):
        members = [s for s in rollout if s["index"] // GROUP == group]
        rewards = [s["reward"] for s in members]
        scale = statistics.stdev(rewards) + 1e-6
        for s in members:
            s["normalised"] = (s["reward"] - statistics.fmean(rewards)) / scale
            s["advantage"] = [s["normalised"]] * len(s["mask"])


def steps_of(rollout):
    size = GROUP * PROMPTS // STEPS
    return [[s for s in rollout if s["rollout"] // size == step] for step in range(STEPS)]


def data_of(rollout, *, dp=(0, 1), cp=(0, 1), batch=3, seed=None, release="head", log_probs=True):
    """One rank's rollout_data: its share of each step, in micro-batches of ``batch`` samples."""
    mine, batches, counts = [], [], []
    for step in steps_of(rollout):
        if seed is not None:
            random.Random(seed).shuffle(step)
        share = step[dp[0] :: dp[1]]
        places = range(len(mine), len(mine) + len(share))
        mine += share
        batches += [list(places[i : i + batch]) for i in range(0, len(places), batch)]
        counts.append(-(-len(places) // batch))
    data = held(rollout, mine, batches, counts, cp=cp, release=release)
    return data if log_probs else {key: value for key, value in data.items() if key != "log_probs"}


def held(rollout, mine, batches, counts, *, cp=(0, 1), release="head"):
    """What a rank holds of its samples ``mine``: the keys of a release."""

    def local(key):
        return [
            slice_response(
                torch.tensor(s[key], dtype=torch.float64), len(s["mask"]) + s["prompt"], len(s["mask"]), *cp
            )
            for s in mine
        ]

    sums = {s["rollout"]: 0 for s in rollout}
    for s in rollout:
        sums[s["rollout"]] += sum(s["mask"])
    data = {
        "loss_masks": [torch.tensor(s["mask"], dtype=torch.int32) for s in mine],
        "total_lengths": [len(s["mask"]) + s["prompt"] for s in mine],
        "response_lengths": [len(s["mask"]) for s in mine],
        "rollout_log_probs": local("behavior"),
        "advantages": local("advantage"),
        "rewards": [s["normalised"] for s in mine],
        "raw_reward": [s["reward"] for s in rollout],
        "sample_indices": [s["index"] for s in mine],
        "host_loss": local("host_loss"),
        "log_probs": local("proximal"),
    }
    if release == "v0.2.4":
        return data
    ids, totals = {"v0.3.0": ("group_ids", "group_mask_sums")}.get(
        release, ("rollout_ids", "rollout_mask_sums")
    )
    data |= {
        ids: [s["rollout"] for s in mine],
        totals: torch.tensor([sums[s["rollout"]] for s in mine], dtype=torch.float32),
        "micro_batch_indices": batches,
        "num_microbatches": counts,
        "global_batch_sizes": [GROUP * PROMPTS // STEPS] * STEPS,
    }
    return data | ({"partition": [s["position"] for s in mine]} if release == "head" else {})


class DataIterator:
    """As slime's, in all its releases: by explicit indices, or by a fixed number of samples."""

    def __init__(self, data, batch=3):
        self.rollout_data, self.offset = data, 0
        self.indices, self.size = data.get("micro_batch_indices"), batch

    def get_next(self, keys):
        data, at = self.rollout_data, self.offset
        places = range(at, at + self.size) if self.indices is None else self.indices[at]
        self.offset += self.size if self.indices is None else 1
        return {key: None if data.get(key) is None else [data[key][p] for p in places] for key in keys}


def schedule(data, batch):
    """How many micro-batches each optimizer step of this rank has."""
    if "micro_batch_indices" in data:
        return data["num_microbatches"]
    return [len(data["loss_masks"]) // STEPS // batch] * STEPS


def step_of(args, data, iterator, count, **more):
    """The optimizer step as our train step opens it before the host's."""
    correction, batch = read_config(args.slime_ext).correction, read_ahead(iterator, count)
    plan = compute_plan(correction, args, batch, ranks(), data, **more)
    return step_metrics.OptimizerStep(samples=Samples.of(batch), plan=(correction, plan))


def train(args, data, cp=(0, 1), batch=4):
    """This rank's share of each sample's loss, before the host's last division; place by place."""
    losses, iterator = {}, DataIterator(data, batch)
    for count in schedule(data, batch):
        with step_metrics.under_way(step_of(args, data, iterator, count)):
            for _ in range(count):
                losses |= trained(args, data, iterator.get_next(PER_SAMPLE), cp)
    return [losses[place] for place in sorted(losses)]


def trained(args, data, taken, cp):
    places = [next(i for i, m in enumerate(data["loss_masks"]) if m is mask) for mask in taken["loss_masks"]]
    host = torch.cat(taken.pop("host_loss"))
    lengths = [len(x) for x in taken["rollout_log_probs"]]
    # The host's surrogate is linear in the advantage: this is where a new baseline shows.
    pg_loss = host * torch.cat(taken["advantages"])
    taken["train_log_probs"] = taken.pop("log_probs")
    loss, masks, _ = tis.correct(args, pg_loss=pg_loss, **taken)
    parts = zip(places, loss.split(lengths), masks, strict=True)
    return {place: divided(args, data, place, part, mask, cp) for place, part, mask in parts}


PER_SAMPLE = (
    "loss_masks",
    "total_lengths",
    "response_lengths",
    "rollout_log_probs",
    "log_probs",
    "advantages",
    "host_loss",
)


def divided(args, data, place, loss, mask, cp):
    local = slice_response(mask, data["total_lengths"][place], data["response_lengths"][place], *cp)
    total = (loss * local).sum()
    if args.calculate_per_token_loss:
        return float(total)
    sums = data.get("rollout_mask_sums", data.get("group_mask_sums"))
    return float(total / max(int(mask.sum()) if sums is None else float(sums[place]), 1))


# ---- the same in plain Python ----


def expected(rollout, specification, *, kept=False, group="ignore", per_token=False, own=False):
    """What each sample contributes to the loss, by position; ``own``: a sample divides by its own tokens."""
    decided = {}
    for step in steps_of(rollout):
        for s, found in zip(step, oracle.correct(specification, step), strict=True):
            decided[s["position"]] = found
    out = {s["position"]: any(s["mask"]) and not any(decided[s["position"]]["keep"]) for s in rollout}
    broken = {s["index"] // GROUP for s in rollout if out[s["position"]]}
    keep = {p: list(found["keep"]) for p, found in decided.items()}
    advantage = {s["position"]: s["normalised"] for s in rollout}
    if group == "atomic":
        for s in rollout:
            if s["index"] // GROUP in broken:
                keep[s["position"]] = [False] * len(s["mask"])
    if group == "rebaseline":
        advantage |= fresh_advantages(rollout, out, broken)
    losses = []
    for s in rollout:
        p = s["position"]
        weights, host = decided[p]["weights"], s["host_loss"]
        terms = [h * w * advantage[p] for h, w, k in zip(host, weights, keep[p], strict=True) if k]
        losses.append(sum(terms) * factor(rollout, s, keep, kept, per_token, own))
    return losses


def fresh_advantages(rollout, out, broken):
    found = {}
    for s in rollout:
        if s["index"] // GROUP not in broken:
            continue
        left = [t for t in rollout if t["index"] // GROUP == s["index"] // GROUP and not out[t["position"]]]
        rewards = [t["reward"] for t in left]
        if out[s["position"]] or len(left) < 2:
            found[s["position"]] = 0.0
        else:
            deviation = statistics.stdev(rewards)
            found[s["position"]] = (s["reward"] - statistics.fmean(rewards)) / (deviation + 1e-6)
    return found


def factor(rollout, s, keep, kept, per_token, own):
    size = GROUP * PROMPTS // STEPS
    if per_token:
        step = [t for t in rollout if t["rollout"] // size == s["rollout"] // size]
        counted, left = sum(max(sum(t["mask"]), 1) for t in step), sum(sum(keep[t["position"]]) for t in step)
        return counted / left if kept and left else 1.0
    family = [t for t in rollout if (t is s if own else t["rollout"] == s["rollout"])]
    counted, left = sum(sum(t["mask"]) for t in family), sum(sum(keep[t["position"]]) for t in family)
    return 1.0 / max(left if kept else counted, 1)

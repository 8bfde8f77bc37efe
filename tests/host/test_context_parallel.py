"""Any split over real gloo processes gives the weights, losses and gradients of one process."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist

from slime_ext import presets, tis
from slime_ext.core.correction import Correction, Tokens, plan_step
from slime_ext.core.losses import Bounds
from slime_ext.core.needs import Need
from slime_ext.core.state import Effect, Step
from slime_ext.core.steps import Clip, EssTruncate, Normalize, Reject, Reweight, Truncate
from slime_ext.core.terms import ReverseK3, SquaredLogRatio
from slime_ext.core.tokens import Head
from slime_ext.errors import DataError
from slime_ext.host.ranks import sum_over
from slime_ext.hosts.contract import METRICS
from slime_ext.ops.segments import Segments, identity
from tests import oracle
from tests.batches import tokens
from tests.core.test_correction import with_log_ratios
from tests.ranks import GROUP, run_ranks
from tests.slices import slice_response
from tests.test_tis import arguments, as_slime_calls

EXTRA = {
    "turn maxima": Correction(steps=(Reject("turn", "k2", "max", high=0.01),)),
    "normalized": Correction(steps=(Reweight("sequence"), Clip(0.5, 2.0), Normalize("sequence"))),
    "normalized tokens": Correction(steps=(Reweight("token"), Truncate(2.0), Normalize())),
    "terms": Correction(
        steps=(
            Reweight("sequence"),
            Truncate(2.0),
            EssTruncate(),
            Reject("sequence", "k2", "mean", high=0.02),
        ),
        terms=(SquaredLogRatio(0.5), ReverseK3(0.5, times_one_minus_ess=True)),
    ),
}
CORRECTIONS = {name: preset.correction for name, preset in presets.PRESETS.items()} | EXTRA
SEEDS = range(4)
PROMPTS, ANSWERS = (90, 108), (10, 12)  # of two ranks the first holds both answers whole
LISTED = ("train_log_probs", "rollout_log_probs", "cur_log_probs", "advantages")
LOCAL = ("proximal", "behavior", "target", "advantages")


@dataclass(frozen=True)
class Aggregated(Step):
    """A user's step: the ratio of values that it sums by itself."""

    of: str = "sequence"
    how: str = "mean"

    effects = frozenset({Effect.REWEIGHT})

    def __call__(self, state, inputs):
        if self.how.startswith("prefix"):
            return state.reweight("token", inputs.prefix(self.of, self.how[7:], inputs.log_ratio).exp())
        return state.reweight(self.of, inputs.aggregate(self.of, self.how, inputs.log_ratio).exp())


def random_pieces(seed, lengths, size):
    """Every sequence cut at random into 2 x size runs, each owned by a random rank; many are empty."""
    rng = random.Random(seed)
    owned = [[] for _ in range(size)]
    for i, n in enumerate(lengths):
        cuts = [0, *sorted(rng.randint(0, n) for _ in range(2 * size - 1)), n]
        owners = [*range(size)] * 2
        rng.shuffle(owners)
        for slot, ((start, stop), owner) in enumerate(zip(pairwise(cuts), owners, strict=True)):
            owned[owner].append((i, start, stop, slot))
    return owned


def evaluate(correction, packed, host_loss):
    outcome = correction(packed)
    loss, _ = correction.loss(outcome, packed, host_loss * packed.target, Bounds())
    (gradient,) = torch.autograd.grad(torch.where(packed.segments.mask, loss, 0).sum(), packed.target)
    return torch.stack([outcome.weights, outcome.keep.double(), loss.detach(), gradient])


def shard(packed, pieces, slots, all_sum):
    """The part of one process's tokens that a rank holds."""
    lengths = packed.segments.lengths
    segments = Segments(lengths, tuple(pieces), packed.segments.full_mask, slots, all_sum)
    begins = [0, *accumulate(lengths)]
    index = [begins[s] + i for s, start, stop, _ in pieces for i in range(start, stop)]
    fields = {key: getattr(packed, key).detach()[index] for key in LOCAL}
    fields["target"].requires_grad_()
    head = Head(packed.head.sampler[index], packed.head.trainer[index])
    return replace(packed, segments=segments, head=head, **fields), index


def split_anyhow(seeds):
    """{(name, seed): largest difference to one process, number of all-reduces}."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for seed in seeds:
        packed, host_loss = tokens(oracle.random_batch(seed))
        pieces = random_pieces(seed, packed.segments.lengths, size)[rank]
        for name, correction in CORRECTIONS.items():
            calls = []

            def all_sum(values, calls=calls):
                calls.append(values.numel())
                dist.all_reduce(values)
                return values

            local, index = shard(packed, pieces, 2 * size, all_sum)
            whole, part = (
                evaluate(correction, packed, host_loss)[:, index],
                evaluate(correction, local, host_loss[index]),
            )
            close = torch.isclose(part, whole, rtol=1e-10, atol=1e-12, equal_nan=True)
            found[name, seed] = (bool(close.all()), len(calls))
    return found


def through_megatron():
    """The same through the hook with slime's zig-zag slices and Megatron's groups."""
    from megatron.core import parallel_state

    names = ("token_tis", "geo_rs", "trm", "turn_tis", "min_prefix", "topr")
    mappings = {name: {"preset": name, "mask_scope": "all"} for name in names}
    mappings["terms"] = {"preset": "geo_rs"} | {
        "terms": ["squared_log_ratio", {"reverse_k3": {"coefficient": 0.5}}]
    }
    cases = {(name, seed): as_slime_calls(oracle.random_batch(seed)) for name in mappings for seed in SEEDS}
    args = {name: arguments(slime_ext=mapping) for name, mapping in mappings.items()}
    alone = {case: tis.correct(args[case[0]], **call) for case, call in cases.items()}
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    return {case: (agrees(args[case[0]], call, alone[case], rank, size), 0) for case, call in cases.items()}


def agrees(args, call, alone, rank, size):
    """Whether this rank's loss, masks and metric are its slices of those of one process."""
    loss, masks, metrics = tis.correct(args, **local(call, rank, size))
    same_masks = all(torch.equal(a, b) for a, b in zip(masks, alone[1], strict=True))
    whole, rejected = (part(call, values, rank, size) for values in (alone[0], alone[2][METRICS[2]]))
    close = torch.allclose(loss, whole, rtol=1e-10, atol=1e-12)
    return same_masks and close and torch.equal(metrics[METRICS[2]], rejected)


def local(call, rank, size):
    """What a context-parallel rank holds of a call."""
    lists = {key: slices(call, call[key], rank, size) for key in LISTED}
    sides = (part(call, values, rank, size) for values in (call["head"].sampler, call["head"].trainer))
    return call | lists | {"pg_loss": part(call, call["pg_loss"], rank, size), "head": Head(*sides)}


def part(call, values, rank, size):
    return torch.cat(slices(call, values.split(call["response_lengths"]), rank, size))


def slices(call, values, rank, size):
    shapes = zip(values, call["total_lengths"], call["response_lengths"], strict=True)
    return [slice_response(v, total, response, rank, size) for v, total, response in shapes]


def with_a_rank_that_holds_nothing():
    """Presets and steps that sum by themselves, where the answers are short and the prompts long."""
    from megatron.core import parallel_state

    steps = {
        (unit, how): {"steps": [{f"{__name__}.Aggregated": {"of": unit, "how": how}}]}
        for unit in ("sequence", "turn")
        for how in ("sum", "mean", "max", "prefix sum", "prefix mean")
    }
    mappings = steps | {name: {"preset": name} for name in presets.PRESETS if name != "metrics_only"}
    rng = random.Random(0)
    batch = [oracle.random_sequence(rng, length, 0.1, wild=False) for length in ANSWERS]
    totals = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    call = as_slime_calls(batch, total_lengths=totals)
    args = {name: arguments(slime_ext=mapping) for name, mapping in mappings.items()}
    alone = {name: tis.correct(args[name], **call) for name in mappings}
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    held = sum(map(len, local(call, rank, size)["train_log_probs"]))
    return held, {name: agrees(args[name], call, alone[name], rank, size) for name in mappings}


def data_parallel_plan():
    """A step plan over data-parallel ranks is that of one process with all micro-batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = [tokens(oracle.random_batch(seed))[0] for seed in range(2 * size)]

    def all_sum(values):
        dist.all_reduce(values)
        return values

    far = [with_log_ratios([-900.0 * i, -900.3 * i], 4, torch.float32) for i in range(1, 2 * size + 1)]
    found = {}
    for name in ("m2", "normalized", "normalized tokens", "p3o"):
        for i, given in enumerate((batches, far)):
            whole = plan_step(CORRECTIONS[name], given).numbers
            local = plan_step(CORRECTIONS[name], given[rank::size], all_sum).numbers
            close = [torch.allclose(whole[s], local[s], rtol=1e-13, atol=1e-13) for s in whole]
            found[name, i] = all(close), 0
    return found


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
@pytest.mark.parametrize(("size", "seeds"), [(2, SEEDS), (4, SEEDS[:2])])
def test_any_split_equals_one_process_with_one_all_reduce(size, seeds):
    for rank, found in enumerate(run_ranks(split_anyhow, size, seeds)):
        assert {case for case, (close, _) in found.items() if not close} == set(), rank
        calls = {name: n for (name, _), (_, n) in found.items()}
        assert max(n for name, n in calls.items() if Need.WHOLE_STEP not in CORRECTIONS[name].needs) == 1
        assert calls["token_tis"] == 0 and calls["seq_is_rs"] == 1


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
def test_the_hook_under_megatrons_groups_equals_one_process():
    for found in run_ranks(through_megatron, 2):
        assert {case for case, (close, _) in found.items() if not close} == set()


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
def test_a_rank_that_holds_no_response_token_takes_part():
    held, found = zip(*run_ranks(with_a_rank_that_holds_nothing, 2), strict=True)
    assert held == (sum(ANSWERS), 0)
    for rank in found:
        assert {name for name, agree in rank.items() if not agree} == set()


@pytest.mark.parametrize("all_sum", [identity, sum_over(None)], ids=["one process", "an all-reduce"])
def test_nothing_that_shares_memory_with_itself_is_summed(all_sum):
    """An all-reduce writes in place; c10d reads a tensor in the order of its memory."""
    row = torch.ones(4, dtype=torch.float64)
    for values in (row.sum().expand(1, 2), row.unfold(0, 2, 1), row[:1].expand(3, 1), row.view(2, 2).t()):
        with pytest.raises(DataError, match=r"all_sum: expected a contiguous tensor, got one of shape"):
            all_sum(values)


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
def test_a_step_plan_over_data_parallel_ranks():
    for found in run_ranks(data_parallel_plan, 2):
        assert {case for case, (close, _) in found.items() if not close} == set()


def test_a_split_without_the_all_reduce_is_seen():
    packed, host_loss = tokens(oracle.random_batch(1))
    pieces = random_pieces(1, packed.segments.lengths, 2)[0]
    local, index = shard(packed, pieces, 4, lambda values: values)
    correction: Correction = presets.get("seq_is")
    whole, part = (
        evaluate(correction, packed, host_loss)[:, index],
        evaluate(correction, local, host_loss[index]),
    )
    assert isinstance(local, Tokens) and not torch.allclose(part, whole)

"""The step plan on slime's own schedule: its cut of a rollout into ranks and micro-batches, its iterator.

``HOSTS=path/to/hosts pytest tests/downstream/test_slime_schedule.py``
"""

from __future__ import annotations

import importlib

import pytest

from slime_ext.host.rollout_data import samples_of
from tests.downstream.host_loss import enter
from tests.host import slime_rollouts as rollouts
from tests.host.test_step_plan import CASES, by_position, close, spec
from tests.ranks import run_ranks

NAMES = ("normalize", "second_moment", "kept", "kept_all", "atomic", "everything")
pytestmark = [pytest.mark.slow]


@pytest.fixture
def slime(host):
    """(folder, release) of slime since it has a schedule of its own."""
    if not host.module("slime.utils.dp_schedule"):
        pytest.skip("this release has no schedule of its own")
    return str(host.folder), {"v0.3.0": "v0.3.0", "v0.3.1": "v0.3.1"}.get(host.release, "head")


def scheduled(args, rollout, dp):
    """slime's (partition, micro_batch_indices) of every rank, num_microbatches, global_batch_sizes."""
    build = importlib.import_module("slime.utils.dp_schedule").build_dp_schedule
    sizes = {"dp_size": dp, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    ids = [s["rollout"] for s in rollout]
    name = "rollout_indices" if "rollout_indices" in build.__code__.co_varnames else "group_indices"
    lengths = [len(s["mask"]) + s["prompt"] for s in rollout]
    return build(args, sizes, lengths, global_batch_size=args.global_batch_size, **{name: ids})


def on_a_rank(folder, release, dp):
    """Every case's losses on one data-parallel rank, and whether slime's iterator hands out our samples."""
    from slime_ext.launcher.megatron import parallel
    from tests.launcher.megatron.tiny_model import tiny_args

    parallel.initialize(tiny_args())
    from megatron.core import parallel_state

    enter(folder, ("slime.utils", "slime.backends.megatron_utils"), absent=("ray", "wandb"))
    rank, found = parallel_state.get_data_parallel_rank(), {}
    for name in NAMES:
        args = rollouts.arguments(CASES[name][0], use_dynamic_batch_size=True, max_tokens_per_gpu=60)
        args.balance_data = args.balance_by_flops = False
        rollout = rollouts.samples(1)
        partitions, batches, counts, _ = scheduled(args, rollout, dp)
        mine = [rollout[position] for position in partitions[rank]]
        data = rollouts.held(rollout, mine, batches[rank], counts, release=release)
        found[name] = partitions[rank], rollouts.train(args, data)
    iterator = importlib.import_module("slime.backends.megatron_utils.data").DataIterator(
        data, micro_batch_indices=batches[rank]
    )
    first = iterator.get_next(["loss_masks"])["loss_masks"]
    return found, [record.place for record in samples_of(first)] == batches[rank][0]


def test_losses_are_the_oracles(slime):
    rollout = rollouts.samples(1)
    for dp in (1, 2):
        ranks = run_ranks(on_a_rank, dp, *slime, dp)
        assert all(known for _, known in ranks)
        for name in NAMES:
            found = by_position(rollout, [losses[name] for losses, _ in ranks])
            assert close(found, rollouts.expected(rollout, spec(name), **CASES[name][2])), (dp, name)

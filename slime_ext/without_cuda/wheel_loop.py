"""miles' training loop for its wheel (miles-rl 0.0.2), which holds every class of the loop and no train.py.

The order of the calls is that of train.py and train_async.py of miles 2b5b7fc, the commit of the wheel
(https://github.com/radixark/miles); all that is called is the wheel's own.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from miles.utils.arguments import parse_args
from miles.utils.logging_utils import configure_logger
from miles.utils.misc import should_run_periodic_action
from miles.utils.tracking_utils import finish_tracking, init_tracking


@dataclass
class _Run:
    """The actors of a run, and what its loop asks of them."""

    args: Namespace
    manager: object
    actor: object
    critic: object
    per_epoch: int | None

    async def evaluate_before(self, rollout: int) -> None:
        args = self.args
        if args.eval_interval is not None and rollout == 0 and not args.skip_eval_before_train:
            await self.manager.eval.remote(rollout)

    async def evaluate_after(self, rollout: int) -> None:
        if should_run_periodic_action(rollout, self.args.eval_interval, self.per_epoch):
            await self.manager.eval.remote(rollout)

    def actor_trains(self, rollout: int) -> bool:
        return not self.args.use_critic or rollout >= self.args.num_critic_only_steps

    async def train(self, rollout: int, data: object) -> None:
        """A rollout's optimizer steps, the critic's beside the actor's."""
        if not self.args.use_critic:
            await self.actor.train(rollout, data)
            return
        import asyncio

        critic = asyncio.create_task(self.critic.train(rollout, data))
        if self.actor_trains(rollout):
            await self.actor.train(rollout, data)
        await critic

    async def save(self, rollout: int) -> None:
        args = self.args
        if not should_run_periodic_action(rollout, args.save_interval, self.per_epoch, args.num_rollout):
            return
        last = rollout == args.num_rollout - 1
        if self.actor_trains(rollout):
            await self.actor.save_model(rollout, force_sync=last)
        if args.use_critic:
            await self.critic.save_model(rollout, force_sync=last)
        if args.rollout_global_dataset:
            await self.manager.save.remote(rollout)

    async def free_trainer(self, rollout: int) -> None:
        """Moves the trainer's memory to the host's, or clears it."""
        if not self.args.offload_train:
            await (self.actor if self.actor_trains(rollout) else self.critic).clear_memory()
        elif self.args.use_critic:
            await self.critic.offload()
            if self.actor_trains(rollout):
                await self.actor.offload()
        else:
            await self.actor.offload()


def parse() -> Namespace:
    """miles' arguments, from sys.argv."""
    return parse_args()


async def _start(args: Namespace) -> _Run:
    configure_logger()
    groups = create_placement_groups(args)
    init_tracking(args)
    manager, per_epoch = create_rollout_manager(args, groups["rollout"])
    actor, critic = await create_training_models(args, groups, manager)
    run = _Run(args, manager, actor, critic, per_epoch)
    if args.offload_rollout:
        await manager.onload_weights.remote()
    await actor.update_weights()
    if args.check_weight_update_equal:
        await manager.check_weights.remote(action="compare")
    if args.offload_rollout:
        await manager.onload_kv.remote()
    return run


async def _end(run: _Run) -> None:
    await run.manager.dispose.remote()
    finish_tracking()


async def train(args: Namespace) -> None:
    """One rollout after the other, each sampled with the weights of the last."""
    run = await _start(args)
    if args.num_rollout == 0 and args.eval_interval is not None:
        await run.manager.eval.remote(rollout_id=0)
    for rollout in range(args.start_rollout_id, args.num_rollout):
        await run.evaluate_before(rollout)
        data = await run.manager.generate.remote(rollout)
        if args.offload_rollout:
            await run.manager.offload.remote()
        await run.train(rollout, data)
        await run.save(rollout)
        await run.free_trainer(rollout)
        if args.offload_rollout:
            await run.manager.onload_weights.remote()
        await run.actor.update_weights()
        if args.offload_rollout:
            await run.manager.onload_kv.remote()
        await run.evaluate_after(rollout)
    await _end(run)


async def train_async(args: Namespace) -> None:
    """Each rollout is sampled while the one before it trains, so with weights one version older."""
    assert not args.colocate, "Colocation is not supported for async training."
    run = await _start(args)
    coming = run.manager.generate.remote(args.start_rollout_id)
    data = None
    for rollout in range(args.start_rollout_id, args.num_rollout):
        if coming is not None:
            data = await coming
        if rollout + 1 < args.num_rollout:
            coming = run.manager.generate.remote(rollout + 1)
        await run.train(rollout, data)
        await run.save(rollout)
        if (rollout + 1) % args.update_weights_interval == 0:
            data = await coming if coming is not None else None  # no push in the middle of a generation
            coming = None
            await run.actor.update_weights()
        await run.evaluate_after(rollout)
    await _end(run)

"""Runs miles' training loop from its wheel (miles-rl 0.0.2), which has no train.py.

The calls have the order of train.py and train_async.py in miles 2b5b7fc, the wheel's commit
(https://github.com/radixark/miles). Offloading is left out, because it needs CUDA. Every function that the
loop calls is the wheel's.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from dataclasses import dataclass

from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from miles.utils.logging_utils import configure_logger
from miles.utils.misc import should_run_periodic_action
from miles.utils.tracking_utils import finish_tracking, init_tracking

from slime_ext_cpu.stand_ins import hosts


@dataclass
class _Run:
    """The actors of a run, and the loop's requests to them."""

    args: Namespace
    manager: object
    actor: object
    critic: object
    per_epoch: int | None

    async def evaluate(self, rollout: int) -> None:
        if should_run_periodic_action(rollout, self.args.eval_interval, self.per_epoch):
            await self.score(rollout)

    async def score(self, rollout: int) -> None:
        await hosts.score(lambda: self.manager.eval.remote(rollout), self.actor.update_weights)

    def trained(self, rollout: int) -> list[object]:
        """Returns the models that a rollout trains. A critic may start to train before the actor does."""
        args = self.args
        critics = [self.critic] if args.use_critic else []
        return critics + [self.actor] * (not critics or rollout >= args.num_critic_only_steps)

    async def train_and_save(self, rollout: int, data: object) -> None:
        """Trains critic and actor on a rollout at the same time. Writes a checkpoint if one is due."""
        args, models = self.args, self.trained(rollout)
        await asyncio.gather(*(model.train(rollout, data) for model in models))
        if not should_run_periodic_action(rollout, args.save_interval, self.per_epoch, args.num_rollout):
            return
        for model in reversed(models):
            await model.save_model(rollout, force_sync=rollout == args.num_rollout - 1)
        if args.rollout_global_dataset:
            await self.manager.save.remote(rollout)


async def _start(args: Namespace) -> _Run:
    configure_logger()
    groups = create_placement_groups(args)
    init_tracking(args)
    manager, per_epoch = create_rollout_manager(args, groups["rollout"])
    actor, critic = await create_training_models(args, groups, manager)
    await actor.update_weights()
    if args.check_weight_update_equal:
        await manager.check_weights.remote(action="compare")
    return _Run(args, manager, actor, critic, per_epoch)


async def train(args: Namespace) -> None:
    """Samples one rollout after another, each with the weights that the previous rollout trained."""
    run = await _start(args)
    is_asked = args.num_rollout == 0 or (args.start_rollout_id == 0 and not args.skip_eval_before_train)
    if args.eval_interval is not None and is_asked:
        await run.score(0)
    for rollout in range(args.start_rollout_id, args.num_rollout):
        data = await run.manager.generate.remote(rollout)
        await run.train_and_save(rollout, data)
        await run.trained(rollout)[-1].clear_memory()
        await run.actor.update_weights()
        await run.evaluate(rollout)
    await run.manager.dispose.remote()
    finish_tracking()


async def train_async(args: Namespace) -> None:
    """Samples each rollout while the previous one trains, so its weights are one version older."""
    assert not args.colocate, "Colocation is not supported for async training."
    run = await _start(args)
    coming = run.manager.generate.remote(args.start_rollout_id)
    data = None
    for rollout in range(args.start_rollout_id, args.num_rollout):
        if coming is not None:
            data = await coming
        if rollout + 1 < args.num_rollout:
            coming = run.manager.generate.remote(rollout + 1)
        await run.train_and_save(rollout, data)
        if (rollout + 1) % args.update_weights_interval == 0:
            data = await coming if coming is not None else None  # never push while a rollout is sampled
            coming = None
            await run.actor.update_weights()
        await run.evaluate(rollout)
    await run.manager.dispose.remote()
    finish_tracking()

"""Rules of the samples' ages."""

from __future__ import annotations

from slime_ext.core.metrics.names import CERTIFICATE
from slime_ext.errors import cut
from slime_ext.hosts.contract import LOG, LOG_FLAG, OURS, flag_of
from slime_ext.rules.rule import HINT, REFUSE, WARN, rule
from slime_ext.rules.setup import Setup

AGES_TOO_LOW = (
    "because the engine otherwise keeps keys and values of older weights over a push, which no weight "
    "version of a sample shows, so ages are too low; the sampler's log-probs are right in both cases"
)


@rule(REFUSE)
def missing_weight_versions(setup: Setup) -> str | None:
    """A key needs the samples' ages, and their weight versions do not reach the trainer."""
    aged = ("staleness_", *CERTIFICATE)  # metrics that nobody can compute without the samples' ages
    guards = [f"slime_ext.guards.{name}" for name in setup.loaded.guards if name.startswith(aged)]
    readers = ["max_staleness"] if setup.correction.needs_ages else guards
    if not readers or getattr(setup.flags, LOG) == OURS[LOG] or not setup.may_run_init:
        return None
    host = setup.known_host(
        "whether this host's trainer gets the samples' weight versions, which slime's does only with "
        f"{LOG_FLAG}"
    )
    if host.carries_versions:
        return None
    keeps = f"{readers[0]}: expected the samples' weight versions, got a {host.name} that keeps them"
    if not host.accepts(LOG, setup.args):  # slime before v0.2.2
        return f"{keeps} and has no {flag_of(LOG)}: use a newer release, or the patch of docs/patches.md"
    return f"{keeps} in its rollout manager: add {LOG_FLAG}"


@rule(WARN)
def ages_beside_kept_cache(setup: Setup) -> str | None:
    """A key reads the samples' ages, and the engine keeps keys and values of older weights."""
    # slime/utils/arguments.py at 002fa9d6 (--flush-cache-interval); miles' weight update mixin at 31f1ca9.
    if not _reads_ages(setup):
        return None
    if setup.flags.flush_cache_interval not in (None, 1):
        return (
            "--flush-cache-interval: expected 1 beside max_staleness or a guard on staleness, got "
            f"{setup.flags.flush_cache_interval:g}: set it to 1, {AGES_TOO_LOW}"
        )
    if setup.flags.pause_generation_mode == "in_place":
        return (
            "--pause-generation-mode: expected retract or abort beside max_staleness or a guard on "
            f"staleness, got in_place: set it to retract, {AGES_TOO_LOW}"
        )
    return None


@rule(HINT)
def ages_of_straw(setup: Setup) -> str | None:
    """Batches come from straw-queue, which keeps old samples, and nothing bounds their age."""
    # slime/utils/staleness.py at 85f762d, docs/en/advanced/straw.md at 12e4668.
    if setup.flags.rollout_data_transport != "straw" or _reads_ages(setup):
        return None
    return (
        "--rollout-data-transport straw: the oldest samples come first, and none is dropped for its age: to "
        "bound the age, write slime_ext.steps: [{reject: {max_staleness: 4}}]. slime's staleness/max "
        "compares the oldest token's version with the engines' when a batch is made; "
        "off_policy/staleness_max compares it with the trainer's latest push, so a push in between makes it "
        "larger"
    )


@rule(HINT)
def asynchronous_rollouts(setup: Setup) -> str | None:
    """Rollouts are sampled while the trainer trains, with weights older than those that are trained."""
    function = str(setup.flags.rollout_function_path or "")
    cause = f"--rollout-function-path {cut(function)}" if "async" in function else ""
    cause = setup.program if setup.program.endswith("_async.py") else cause
    if not cause:
        return None
    lag = (
        f"{cause} samples while the trainer trains: the sampler's weights are at least one push older than "
        "the trainer's, and every ratio shows this lag beside numerics"
    )
    host = setup.host
    if getattr(setup.flags, LOG) == OURS[LOG] or (host is not None and host.carries_versions):
        return f"{lag}: off_policy/staleness_mean measures the lag"
    name = host.name if host is not None else "slime"
    return f"{lag}: add {LOG_FLAG}, because {name}'s trainer otherwise does not know the samples' ages"


def _reads_ages(setup: Setup) -> bool:
    """Tells whether the correction or a guard acts on the ages of samples."""
    return setup.correction.needs_ages or any(name.startswith("staleness_") for name in setup.loaded.guards)

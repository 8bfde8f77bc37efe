"""Names systems that convert does not read, though some share keys with those that it reads.

Each was run or read at the release or commit that its line or its table in docs/convert.md names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from slime_ext.errors import ConfigError


class Elsewhere(NamedTuple):
    """A system without a reader.

    Args:
        title: the name that the system gives itself.
        keys: keys that only this system has, each of which tells the system.
        why: what the system computes, and what its user can do.
        together: keys that only this system has side by side.
    """

    title: str
    keys: tuple[str, ...]
    why: str
    together: tuple[str, ...] = ()


def _in_a_table(title: str, *keys: str) -> Elsewhere:
    why = f"convert has no reader for it: translate by hand with the table {title} of docs/convert.md"
    return Elsewhere(title, keys, why)


ELSEWHERE = {
    "roll": _in_a_table("ROLL", "train_infer_correction", "is_weight"),
    "nemo_rl": _in_a_table(
        "NeMo-RL", "truncated_importance_sampling_type", "use_importance_sampling_correction"
    ),
    "prime_rl": _in_a_table("prime-rl", "dppo_mask_low", "dppo_mask_high", "ipo_threshold", "kl_tau"),
    "open_instruct": _in_a_table(
        "open-instruct", "rollout_importance_correction", "policy_ratio_denominator", "rho_mask_metric"
    ),
    "agilerl": Elsewhere(
        "AgileRL",
        ("off_policy_token_mask_bounds", "off_policy_sequence_mask_threshold"),
        "three corrections act at once in 2.58.0, two of them by the current policy's ratio to the sampler: "
        "write the one that you want",
    ),
    "axolotl": Elsewhere(
        "axolotl",
        ("base_model",),
        "in 0.21.0 its asynchronous trainer has TRL's keys, but a floor of 1 / cap below every weight: write "
        "clip: {low: 1 / cap, high: cap} for token_truncate",
        ("rl", "trl"),
    ),
    "unsloth": Elsewhere(
        "unsloth",
        (),  # it has TRL's
        "2026.10.9 has TRL's keys, but vllm_importance_sampling_correction is false by default, and modes "
        "that TRL lacks: write the keys that you use, and --from trl if the mode is TRL's",
    ),
    "trinity_rft": Elsewhere(
        "Trinity-RFT",
        ("algorithm_type", "policy_loss_fn"),
        "no loss of 0.6.0's default trainer reads algorithm.rollout_correction: translate what "
        "policy_loss_fn names",
    ),
    "art": Elsewhere(
        "openpipe-art",
        ("max_negative_advantage_importance_sampling_weight", "truncated_importance_sampling"),
        "0.5.23 trains with CISPO over the sampler, a weight from 0 to 5, and a masked token trains on with "
        "weight 0.8: no correction here does that",
    ),
    "tinker_cookbook": Elsewhere(
        "tinker-cookbook",
        ("max_steps_off_policy", "groups_per_batch"),
        "its losses run in the service, and asynchronous runs of 0.6.1 use stable_reinforce, whatever "
        "loss_fn says; for importance_sampling use the preset importance_sampling",
    ),
    "tunix": Elsewhere(
        "Tunix",
        ("sampler_is", "sampler_is_threshold"),
        "for sampler_is: token in 0.1.7 write reweight: {level: token}, truncate: {high: 2.0}, which is its "
        "sampler_is_threshold by default",
    ),
    "torchrl": Elsewhere(
        "TorchRL",
        ("kl_mask_threshold",),
        "in 0.14.1 it drops tokens by the current policy and the sampler, though documented against the "
        "reference, and they leave its divisor: nearest is numerator: target, reject: {unit: token, "
        "statistic: k2, high: kl_mask_threshold}, which keeps the host's",
    ),
}


def refuse(where: str, system: str, known: str) -> None:
    """Raises ConfigError that says what to do instead of reading a system."""
    title_and_why = f"{ELSEWHERE[system].title}: {ELSEWHERE[system].why}"
    raise ConfigError(f"{where}: expected one of {known}, got {title_and_why}")


def elsewhere_of(settings: Mapping[str, Any]) -> str:
    """Returns the system without a reader whose keys a file has; empty without such keys."""
    keys = set(_keys(settings))
    for name, each in ELSEWHERE.items():
        if keys & set(each.keys) or (each.together and settings.keys() >= set(each.together)):
            return name
    return ""


def _keys(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys of nested mappings."""
    for key, value in settings.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from _keys(value)

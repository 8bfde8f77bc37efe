"""Names the systems that convert does not read, and says where their settings are explained."""

from __future__ import annotations

from typing import NamedTuple

TABLE = "convert has no reader for it: translate by hand with the table {title} of docs/convert.md"


class Elsewhere(NamedTuple):
    """A system without a reader.

    Args:
        title: the name that the system gives itself.
        keys: keys that only this system has, each of which tells the system.
        why: what a user of the system can do.
    """

    title: str
    keys: tuple[str, ...]
    why: str


def _in_a_table(title: str, *keys: str) -> Elsewhere:
    return Elsewhere(title, keys, TABLE.format(title=title))


ELSEWHERE = {
    "roll": _in_a_table("ROLL", "train_infer_correction", "is_weight"),
    "nemo_rl": _in_a_table(
        "NeMo-RL", "truncated_importance_sampling_type", "use_importance_sampling_correction"
    ),
    "prime_rl": _in_a_table("prime-rl", "dppo_mask_low", "dppo_mask_high", "ipo_threshold", "kl_tau"),
    "open_instruct": _in_a_table(
        "open-instruct", "rollout_importance_correction", "policy_ratio_denominator", "rho_mask_metric"
    ),
}

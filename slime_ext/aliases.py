"""Other systems' names of presets: alias -> preset. Imports nothing, so that listing presets is fast."""

from __future__ import annotations

ALIASES: dict[str, str] = {
    "disabled": "metrics_only",
    "token_is": "token_tis",
    "skyrl_token_tis": "token_tis",
    "fireworks_sequence": "fireworks_geometric",
    "decoupled_token_is": "token_tis",
    "decoupled_seq_is": "seq_is",
    "decoupled_seq_is_rs": "seq_is_rs",
    "decoupled_token_icepop": "icepop",
    "bypass_ppo_clip": "ppo_is_bypass",
    "bypass_pg_is": "pure_is",
}

"""One sampled response, under slime's field names. No torch: supervisor and rewards read it too."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

PENDING, COMPLETED, TRUNCATED, ABORTED, FAILED = "pending", "completed", "truncated", "aborted", "failed"

# The part of slime's dump that a text-only run leaves empty, kept so that slime's readers find every key.
_UNUSED_BY_US: dict[str, Any] = {
    "multimodal_inputs": None,
    "multimodal_train_inputs": None,
    "multimodal_train_input_id": None,
    "rollout_top_p_token_ids": None,
    "rollout_top_p_token_offsets": None,
    "rollout_routed_experts": None,
    "teacher_log_probs": None,
    "generate_function_path": None,
    "custom_rm_path": None,
    "session_id": None,
    "non_generation_time": 0.0,
}


@dataclass
class RolloutSample:
    """A prompt with one response: tokens = prompt ids + response ids, the rest per response token.

    `rollout_log_probs`, `loss_mask` and `token_weight_versions` have `response_length` entries.
    `weight_versions` has one entry per span of tokens that one version of the weights sampled. A sample that
    must not be trained on (`remove_sample`) stays in its group: its loss mask is 0 everywhere and
    `metadata["dropped"]` says why.

    Source: slime `slime/utils/types.py`, class Sample; `token_weight_versions` is ours.
    """

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: str = PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    token_weight_versions: list[str] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def response_tokens(self) -> list[int]:
        """[R] ids of the response."""
        return self.tokens[self.prompt_length :]

    @property
    def dropped(self) -> str | None:
        """Why the sample takes no part in training, or None."""
        return self.metadata.get("dropped")

    def drop(self, reason: str, status: str = FAILED) -> RolloutSample:
        """Takes the sample out of training in place: mask 0, missing log-probs 0.0, the reason kept."""
        known = self.rollout_log_probs or []
        self.status, self.remove_sample = status, True
        self.metadata["dropped"] = reason
        self.loss_mask = [0] * self.response_length
        self.rollout_log_probs = known if len(known) == self.response_length else [0.0] * self.response_length
        versions = [*self.token_weight_versions, *["unknown"] * self.response_length]
        self.token_weight_versions = versions[: self.response_length]
        return self

    def to_dict(self) -> dict[str, Any]:
        """The sample as slime dumps it, with our `token_weight_versions` as the last key."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        cached, versions = own.pop("cached_tokens"), own.pop("token_weight_versions")
        return {
            **own,
            **_UNUSED_BY_US,
            "apply_chat_template_kwargs": {},
            "spec_info": dict.fromkeys(_SPEC_INFO, 0) | {"completion_token_num": self.response_length},
            "prefix_cache_info": {"cached_tokens": cached, "total_prompt_tokens": self.prompt_length},
            "token_weight_versions": versions,
        }


_SPEC_INFO = ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct", "completion_token_num")

"""What miles leaves of its first loss calls: the distance between the log-prob pass and training."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.readers.loss_calls import first_calls


def write_call(folder, name, train, old, rollout, mask):
    rows = {"train_log_probs": train, "old_log_probs": old, "rollout_log_probs": rollout}
    sample = {key: torch.tensor(values) for key, values in (rows | {"local_loss_mask": mask}).items()}
    (folder / "policy_loss_debug").mkdir(exist_ok=True)
    torch.save({"samples": [sample]}, folder / f"policy_loss_debug/{name}.pt")


def test_the_first_call_of_every_rank_counts_and_masked_tokens_do_not(tmp_path):
    nan = float("nan")
    write_call(tmp_path, "rank_0_call_0", [-1.0, -2.0], [-1.5, -9.0], [-1.0, -2.0], [1.0, 0.0])
    write_call(tmp_path, "rank_1_call_0", [-1.0, -3.0], [-1.1, nan], [-1.4, -3.0], [1.0, 1.0])
    write_call(tmp_path, "rank_0_call_1", [-1.0], [-7.0], [-1.0], [1.0])  # after a step, maybe
    ((tokens, trained, sampled),) = first_calls(tmp_path)
    assert tokens == 2
    assert (trained, sampled) == (pytest.approx((0.5 + 0.1) / 2), pytest.approx((0.5 + 0.3) / 2))


def test_other_files_are_none(tmp_path):
    assert first_calls(tmp_path) == ()
    (tmp_path / "policy_loss_debug").mkdir()
    (tmp_path / "policy_loss_debug/rank_0_call_0.pt").write_bytes(b"no file of torch")
    assert first_calls(tmp_path) == ()

"""``init`` alone measures the policy loss, whatever corrects it, and does not touch loss or gradient."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from slime_ext import host, presets, tis
from slime_ext.core.metrics.names import scalars
from slime_ext.errors import ConfigError, GuardError
from tests import oracle
from tests.core.metrics.test_statistics import accumulated
from tests.host import trees
from tests.host.slime_rollouts import DataIterator

SEED, COUNT = 1, 2  # of the batch, and its micro-batches


def rollout(proximal=True):
    """A rank's rollout, with the target's log-probs in place of a model's logits."""
    batch = [s for s in oracle.random_batch(SEED, wild=False) if s["mask"]]

    def column(key):
        return [torch.tensor(s[key], dtype=torch.float64) for s in batch]

    lengths = [len(s["mask"]) for s in batch]
    data = {
        "cur": [values.requires_grad_() for values in column("target")],
        "log_probs": column("proximal") if proximal else None,
        "rollout_log_probs": column("behavior"),
        "advantages": column("advantage"),
        "loss_masks": [torch.tensor(s["mask"], dtype=torch.int32) for s in batch],
        "response_lengths": lengths,
        "total_lengths": [n + 3 for n in lengths],
        "sample_indices": list(range(len(batch))),
        "micro_batch_indices": [list(range(i, len(batch), COUNT)) for i in range(COUNT)],
    }
    return batch, data


def trained(made, data, **flags):
    """(what the host logs, the gradient) of one optimizer step."""
    args = SimpleNamespace(**{"use_tis": False, "custom_tis_function_path": None, **flags})
    for values in data["cur"]:
        values.grad = None
    model = [SimpleNamespace(role="actor")]
    losses, _ = made.step.train_one_step(args, 3, 0, [DataIterator(data)], model, None, None, COUNT)
    gradient = torch.cat([values.grad for values in data["cur"]])
    return losses, gradient


def doubling(args, *, pg_loss, loss_masks, **kwargs):
    """A hook of a user's own."""
    return 2 * pg_loss, loss_masks, {}


WHO_CORRECTS = {
    "nothing": {},
    "a hook of one's own": {"use_tis": True, "custom_tis_function_path": f"{__name__}.doubling"},
}


@pytest.mark.parametrize("layout", trees.LAYOUTS)
@pytest.mark.parametrize("who", WHO_CORRECTS)
def test_metrics_are_ours_and_loss_and_gradient_the_hosts(who, layout, tmp_path, monkeypatch):
    made = trees.made(tmp_path, monkeypatch, layout)
    batch, data = rollout()
    alone, gradient = trained(made, data, **WHO_CORRECTS[who])
    assert set(alone) == {"loss"}
    host.init(SimpleNamespace(**{"use_tis": False, "custom_tis_function_path": None, **WHO_CORRECTS[who]}))
    found, same = trained(made, data, **WHO_CORRECTS[who])
    bitwise = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close((found.pop("loss"), same), (alone["loss"], gradient), **bitwise)
    wanted = scalars(accumulated(presets.get("metrics_only"), batch))
    assert found == pytest.approx(wanted, rel=1e-9, nan_ok=True)


def test_proximal_log_probs_that_a_host_skips_are_the_targets_and_it_says_so(tmp_path, monkeypatch, caplog):
    made = trees.made(tmp_path, monkeypatch)
    host.init(SimpleNamespace(use_tis=False))
    batch, data = rollout(proximal=False)
    found, _ = trained(made, data)
    wanted = scalars(accumulated(presets.get("metrics_only"), [s | {"proximal": s["target"]} for s in batch]))
    assert found["off_policy/k3_kl"] == pytest.approx(wanted["off_policy/k3_kl"], rel=1e-9)
    assert [line for line in caplog.messages if "use the target's" in line] == [caplog.messages[-1]]


def test_where_our_hook_corrects_nothing_is_counted_twice(tmp_path, monkeypatch):
    made = trees.made(tmp_path, monkeypatch)
    flags = {"use_tis": True, "custom_tis_function_path": "slime_ext.tis.geo_rs"}
    host.init(SimpleNamespace(**flags))
    batch, data = rollout()
    found, _ = trained(made, data, **flags)
    wanted = scalars(accumulated(presets.get("geo_rs"), batch))
    assert {k: v for k, v in found.items() if k != "loss"} == pytest.approx(wanted, rel=1e-9, nan_ok=True)


def wrapping(args, **kwargs):
    """A hook of a user's own that goes through ours."""
    return tis.token_tis(args, **kwargs)


def test_a_hook_of_ones_own_that_calls_ours_is_counted_once(tmp_path, monkeypatch):
    made = trees.made(tmp_path, monkeypatch)
    flags = {"use_tis": True, "custom_tis_function_path": f"{__name__}.wrapping"}
    monkeypatch.setitem(globals(), "wrapping", wrapping)  # what init wraps is put back
    host.init(SimpleNamespace(**flags))
    batch, data = rollout()
    assert trained(made, data, **flags)[0]["off_policy/tokens"] == sum(sum(s["mask"]) for s in batch)


def test_guards_and_the_file_work_with_init_alone(tmp_path, monkeypatch):
    made = trees.made(tmp_path, monkeypatch)
    config = {"guards": {"k3_kl": {"max": 1e-12, "action": "stop"}}, "metrics": {"curves": "file"}}
    host.init(SimpleNamespace(use_tis=False, slime_ext=config))
    with pytest.raises(GuardError, match="off_policy/k3_kl: expected at most 1e-12"):
        trained(made, rollout()[1], slime_ext=config, save=str(tmp_path))
    (row,) = map(json.loads, (tmp_path / "off_policy.jsonl").read_text().splitlines())
    assert row["rollout_id"] == 3 and any("by_position" in name for name in row)


def test_a_rollout_without_log_probs_is_one_line(tmp_path, monkeypatch, caplog):
    made = trees.made(tmp_path, monkeypatch)
    host.init(SimpleNamespace(use_tis=False))
    data = rollout()[1] | {"rollout_log_probs": None}
    found, _ = trained(made, data)
    assert found["off_policy/tokens"] == 0
    (line,) = caplog.messages
    assert line.startswith("rollout_log_probs: expected them in every batch")


def test_a_loss_that_is_not_the_policy_loss_is_one_line(tmp_path, monkeypatch, caplog):
    made = trees.made(tmp_path, monkeypatch)
    host.init(SimpleNamespace(use_tis=False))
    other = lambda args, batch, cur, _: (sum(map(torch.sum, cur)), {})  # noqa: E731
    monkeypatch.setattr(made.loss, "policy_loss_function", other)
    trained(made, rollout()[1])
    assert "expected a call of policy_loss_function in every optimizer step, got none" in caplog.messages[-1]


def test_the_target_reaches_a_hook_in_every_layout_and_dynamic_context_parallelism_is_refused(
    tmp_path, monkeypatch
):
    made = trees.made(tmp_path, monkeypatch, "Relax")
    flags = {"use_tis": True, "custom_tis_function_path": "slime_ext.tis.off_policy_is"}
    host.init(SimpleNamespace(**flags))
    found, gradient = trained(made, rollout()[1], **flags)
    assert gradient.any() and found["off_policy/tokens"] > 0
    with pytest.raises(ConfigError, match="--dynamic-context-parallel: expected off"):
        made.loss.policy_loss_function(None, {"dynamic_cp_size": 2}, None, None)
    with pytest.raises(ConfigError, match="--dynamic-context-parallel: expected off"):
        host.init(SimpleNamespace(**flags, dynamic_context_parallel=True))


def init(args):
    """An init of a user's own, which calls ours."""
    args.mine = True
    host.init(args)


def test_an_init_of_ones_own_calls_ours(tmp_path, monkeypatch):
    made = trees.made(tmp_path, monkeypatch)
    args = SimpleNamespace(use_tis=False, custom_megatron_init_path=f"{__name__}.init")
    init(args)
    assert args.mine and trained(made, rollout()[1])[0]["off_policy/tokens"] > 0


SEEN = []


def reading(args, *, pg_loss, loss_masks, cur_log_probs=None, advantages=None, **kwargs):
    """A hook of a user's own that reads what hosts do not pass."""
    SEEN.append((cur_log_probs, advantages))
    return pg_loss, loss_masks, {}


def test_a_hook_of_ones_own_gets_the_target_and_the_advantages(tmp_path, monkeypatch):
    made = trees.made(tmp_path, monkeypatch)
    monkeypatch.setitem(globals(), "reading", reading)  # what init wraps is put back
    flags = {"use_tis": True, "custom_tis_function_path": f"{__name__}.reading"}
    SEEN.clear()
    for _ in range(2):
        host.init(SimpleNamespace(**flags))
    data = rollout()[1]
    trained(made, data, **flags)
    assert len(SEEN) == COUNT and all(values.requires_grad for cur, _ in SEEN for values in cur)
    assert SEEN[0][1] == [data["advantages"][i] for i in data["micro_batch_indices"][0]]
    reading(None, pg_loss=None, loss_masks=None)  # outside of the policy loss there is nothing to carry
    assert SEEN[-1] == (None, None)

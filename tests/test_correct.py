"""The flat call: its three spellings, and one line for each mistake; its numbers: tests/test_presets.py."""

from __future__ import annotations

import math

import pytest
import torch

import slime_ext
from slime_ext import presets, tis
from slime_ext.errors import ConfigError, DataError, NonFiniteError
from tests import oracle
from tests.batches import flat_call
from tests.test_tis import arguments, as_slime_calls


def test_a_name_a_mapping_and_a_correction_say_the_same():
    call = flat_call(oracle.random_batch(1))
    given = ["icepop", {"preset": "icepop"}, presets.get("icepop")]
    losses = [slime_ext.correct(**call, correction=each)[0] for each in given]
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])


def test_a_file_says_the_same_as_its_mapping(tmp_path):
    """Under ``slime_ext:`` as in a host's file, or alone; a shipped one by its name from anywhere."""
    call = flat_call(oracle.random_batch(1))
    wanted = slime_ext.correct(**call, correction="icepop")[0]
    nested, plain = tmp_path / "nested.yaml", tmp_path / "plain.json"
    nested.write_text("use_tis: true\nslime_ext: {preset: icepop}\n")
    plain.write_text('{"preset": "icepop"}')
    for path in (nested, str(nested), plain, str(plain)):
        assert torch.equal(slime_ext.correct(**call, correction=path)[0], wanted)
        assert slime_ext.load_config(path) == presets.get("icepop")
    assert slime_ext.load_config("configs/modes/pure_is.yaml") == presets.get("pure_is")
    assert slime_ext.load_config({"use_tis": True, "slime_ext": {"preset": "icepop"}}) == presets.get(
        "icepop"
    )


def test_without_a_mask_every_token_was_sampled():
    call = flat_call(
        [
            {k: [-1.0, -2.0] for k in ("proximal", "behavior", "target", "advantage", "host_loss")}
            | {"mask": [1, 0]}
        ]
    )
    del call["mask"]
    assert slime_ext.correct(**call, correction="token_tis")[1].tolist() == [True, True]


@pytest.mark.parametrize("name", ["token_tis", "geo_rs", "metrics_only", "ipo"])
def test_a_masked_token_is_not_kept(name):
    call = flat_call(
        [
            {k: [-1.0, -2.0, -1.0] for k in ("proximal", "behavior", "target", "advantage", "host_loss")}
            | {"mask": [1, 0, 1]}
        ]
    )
    assert slime_ext.correct(**call, correction=name)[1].tolist() == [True, False, True]


VALUES = (math.nan, math.inf, -math.inf, 0.7, 0.02, -9999.0, -1000.0, -999.0, 0.0099)  # the last two are some


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("mapping", [{"preset": "token_tis"}, {"preset": "seq_is"}], ids=str)
def test_the_flat_call_and_the_hook_reject_and_count_the_same_log_probs(value, mapping):
    sample = {k: [-1.0, -2.0, -0.5] for k in ("proximal", "behavior", "target", "advantage", "host_loss")}
    batch = [sample | {"mask": [1, 1, 1]}, sample | {"mask": [1, 0, 1], "behavior": [-1.0, value, -0.5]}]
    batch.append(sample | {"mask": [1, 1, 1], "behavior": [-1.0, value, -0.5]})
    _, keep, metrics = slime_ext.correct(**flat_call(batch), correction=mapping)
    loss, _, of_hook = tis.correct(arguments(slime_ext=mapping), **as_slime_calls(batch))
    lost = [] if value in (-999.0, 0.0099) else [6, 7, 8] if mapping["preset"] == "seq_is" else [7]
    assert (~keep).nonzero()[:, 0].tolist() == sorted([4, *lost])
    assert torch.equal(of_hook["off_policy/host/rejected"] == 0, keep | ~flat_call(batch)["mask"])
    assert metrics["off_policy/nonfinite_fraction"] == pytest.approx(1 / 8 if lost else 0)
    assert loss.isfinite().all() and math.isfinite(metrics["off_policy/k3_kl"])


NAN, SENTINEL = torch.tensor([math.nan, -1.0]), torch.tensor([-9999.0, -1.0])
RAISE = {"preset": "icepop", "on_nonfinite": "raise"}
HEAD = torch.tensor([[-0.5, -2.0, -3.0], [-1.0, -1.5, -2.5]])  # 2 tokens, the sampler's 3 likeliest
CENTERED = {"surrogate": "reinforce", "numerator": "target", "steps": ["reweight"], "center": {"top_k": 3}}


@pytest.mark.parametrize(
    ("changes", "kind", "line"),
    [
        ({"correction": "token_tiss"}, ConfigError, "preset: expected a known .*did you mean 'token_tis'"),
        ({"correction": "none.yaml"}, ConfigError, "none.yaml: expected a readable file, got No such file"),
        (
            {"correction": {"slime_ext": {"preset": "icepop"}, "steps": []}},
            ConfigError,
            "steps: expected it under slime_ext, got it beside slime_ext: indent it",
        ),
        ({"correction": {"step": []}}, ConfigError, "slime_ext: expected a known key, got 'step'"),
        ({"correction": "pure_is", "target": None}, ConfigError, "target: expected a tensor, got None"),
        (
            {"correction": "pure_is", "advantages": None},
            ConfigError,
            "advantages: expected a tensor, got None",
        ),
        ({"correction": {"steps": [{"reject": {"max_staleness": 2}}]}}, ConfigError, "no max_staleness"),
        (
            {"correction": {"preset": "icepop", "denominator": "kept"}},
            ConfigError,
            "correction: expected no denominator: kept",
        ),
        (
            {"correction": {"preset": "icepop", "group": "atomic"}},
            ConfigError,
            "correction: expected no group",
        ),
        ({"behavior": [-1.0, -2.0]}, DataError, "behavior: expected a tensor, got a list: pass torch.as_te"),
        ({"mask": [1, 1]}, DataError, "mask: expected a tensor, got a list: pass torch.as_tensor.mask."),
        ({"mask": [[1], [1]]}, DataError, "got a list: pass torch.cat.*as_tensor.x. for x in mask"),
        ({"loss": (torch.ones(1), torch.ones(1))}, DataError, "got a tuple: pass torch.cat"),
        ({"loss": [torch.tensor(1.0)] * 2}, DataError, "got a list: pass torch.as_tensor.loss."),
        ({"loss": torch.tensor([1, 1])}, DataError, "loss: expected floating-point numbers, got torch.int64"),
        ({"loss": torch.ones(2) > 0}, DataError, "loss: expected floating-point numbers, got torch.bool"),
        ({"proximal": torch.zeros(2) * 1j}, DataError, "proximal: expected floating-point numbers, got to"),
        *[
            ({name: None}, DataError, f"{name}: expected a tensor, got None: pass {name} of every token")
            for name in ("loss", "behavior", "proximal")
        ],
        *[
            (
                {"head": head, "correction": CENTERED},
                DataError,
                f"head: expected two or three .* got {got}",
            )
            for head, got in [
                (HEAD, "a Tensor: pass"),
                (3, "a int: pass"),
                ((HEAD,), "a tuple: pass"),
                ((HEAD.tolist(), HEAD.tolist()), "a tuple: pass"),
                ((HEAD, HEAD.long()), "a tuple: pass"),
                ((HEAD, HEAD[:, :2]), r"shapes \[\[2, 3\], \[2, 2\]\]: pass"),
                ((HEAD[0], HEAD[0]), r"shapes \[\[3\], \[3\]\]: pass"),
            ]
        ],
        ({"head": (HEAD[:1], HEAD[:1]), "correction": CENTERED}, DataError, "head: expected 2 rows, the sum"),
        ({"head": (HEAD.exp(), HEAD), "correction": CENTERED}, DataError, "head: expected log-probs of the"),
        (
            {"head": (HEAD, HEAD * NAN[0]), "correction": CENTERED},
            NonFiniteError,
            "head: expected finite log",
        ),
        (
            {"head": (HEAD, HEAD.exp()), "correction": CENTERED},
            DataError,
            "head: .* of the trainer, at most 0",
        ),
        *[
            ({name: torch.tensor([0.3, 1.0])}, DataError, f"{name}: expected log-probs, .*: pass {name}.log")
            for name in ("behavior", "proximal", "target")
        ],
        ({"lengths": [3, -1]}, DataError, "lengths: expected a list of whole numbers from 0 up, got "),
        ({"lengths": [1.0, 1.0]}, DataError, "lengths: expected a list of whole numbers from 0 up, got "),
        ({"lengths": 2}, DataError, "lengths: expected a list of whole numbers from 0 up, got 2: pass"),
        ({"lengths": [3]}, DataError, r"loss: expected shape \[3\], the sum of lengths, got \[2\]"),
        ({"behavior": torch.zeros(2, 1)}, DataError, r"behavior: expected shape \[2\].* got \[2, 1\]"),
        ({"proximal": NAN}, NonFiniteError, "proximal: expected finite log-probs"),
        ({"target": NAN}, NonFiniteError, "target: expected finite log-probs"),
        ({"behavior": NAN, "correction": RAISE}, NonFiniteError, "behavior: expected log-probs above -1000"),
        (
            {"behavior": SENTINEL, "correction": RAISE},
            NonFiniteError,
            "behavior: expected log-probs above -10",
        ),
    ],
)
def test_a_mistake_is_one_line(changes, kind, line):
    sample = {k: [-1.0, -2.0] for k in ("proximal", "behavior", "target", "advantage", "host_loss")}
    call = flat_call([sample | {"mask": [1, 1]}], correction="token_tis")
    with pytest.raises(kind, match=line) as caught:
        slime_ext.correct(**call | changes)
    assert "\n" not in str(caught.value)


def test_lengths_may_be_read_once_and_a_shorter_head_ends_in_minus_infinity():
    sample = {k: [-1.0, -2.0] for k in ("proximal", "behavior", "target", "advantage", "host_loss")}
    call = flat_call([sample | {"mask": [1, 1]}], correction=CENTERED)
    shorter = HEAD.clone()
    shorter[1, 2] = -math.inf
    ends = []
    for trainer in (HEAD, torch.where(shorter.isfinite(), HEAD, NAN[0])):
        changes = {"lengths": (n for n in (1, 1)), "head": (shorter, trainer)}
        ends.append(slime_ext.correct(**call | changes)[0])
    assert ends[0].isfinite().all() and torch.equal(*ends)


# Probabilities of four tokens, of which the first was sampled; the fifth is the tail.
SAMPLER, PROXIMAL, TRAINER = (0.40, 0.30, 0.20, 0.05), (0.50, 0.25, 0.15, 0.05), (0.70, 0.15, 0.10, 0.02)
CAPPED = {"steps": ["reweight", {"truncate": {"high": 1.1}}], "center": {"top_k": 4}}
READ_PROXIMAL = {  # correction -> the oracle's loss, and the slope of log p of the first token
    "ppo_clip": ({**CAPPED, "surrogate": "ppo_clip"}, ("ppo", "proximal", 0.2, 0.2), -0.70),
    "reinforce": ({**CAPPED, "surrogate": "reinforce"}, ("reinforce",), -0.727),
    "host": (CAPPED, ("ppo", "proximal", 0.2, 0.2), -0.70),
}


def logs(*policies):
    return [torch.tensor([policy], dtype=torch.float64).log() for policy in policies]


def centered_call(**changes):
    sampler, proximal, trainer = logs(SAMPLER, PROXIMAL, TRAINER)
    return {
        "loss": torch.zeros(1, dtype=torch.float64),
        "behavior": sampler[:, 0],
        "proximal": proximal[:, 0],
        "target": trainer[:, 0],
        "advantages": torch.ones(1, dtype=torch.float64),
        "lengths": [1],
        "head": (sampler, trainer.requires_grad_(), proximal),
    } | changes


@pytest.mark.parametrize("name", READ_PROXIMAL)
def test_center_reads_the_proximal_policy_where_the_loss_or_the_weights_do(name):
    mapping, of_loss, first = READ_PROXIMAL[name]
    call = centered_call(correction=mapping)
    (slopes,) = torch.autograd.grad(slime_ext.correct(**call)[0].sum(), call["head"][1])

    def g(log_p, log_o, log_q):
        return min(math.exp(log_o - log_q), 1.1) * oracle.score_factor(of_loss, 1.0, log_p, log_o, log_q)

    each = [tuple(map(math.log, three)) for three in zip(TRAINER, PROXIMAL, SAMPLER, strict=True)]
    wanted = oracle.candidate_coefficients(each, g, has_tail=True)
    assert slopes[0].tolist() == pytest.approx(wanted, rel=1e-12) and wanted[0] == pytest.approx(first, 1e-3)


@pytest.mark.parametrize("name", READ_PROXIMAL)
def test_the_trainers_head_stands_in_for_the_proximal_policys_only_where_both_policies_are_equal(name):
    sampler, trainer = logs(SAMPLER, TRAINER)
    call = centered_call(correction=READ_PROXIMAL[name][0], head=(sampler, trainer))
    with pytest.raises(ConfigError, match=r"head: expected three tensors, got two: pass \(sampler, trainer"):
        slime_ext.correct(**call)
    on_policy = [
        centered_call(
            correction=READ_PROXIMAL[name][0],
            proximal=trainer[:, 0],
            head=(sampler, trainer.requires_grad_(), *more),
        )
        for more in ([], [trainer.detach()])
    ]
    losses = [slime_ext.correct(**call)[0] for call in on_policy]
    assert torch.equal(*losses)
    of_target = {**CAPPED, "surrogate": "reinforce", "numerator": "target"}  # reads no proximal policy
    assert slime_ext.correct(**call | {"correction": of_target})[0].isfinite().all()


def test_the_host_loss_without_a_target_needs_the_proximal_policys_head():
    sampler, trainer = logs(SAMPLER, TRAINER)
    call = centered_call(correction=CAPPED, target=None, head=(sampler, trainer))
    with pytest.raises(ConfigError, match="head: expected three tensors, got two"):
        slime_ext.correct(**call)


def test_a_wrong_number_in_the_proximal_policys_head_is_named():
    sampler, proximal, trainer = logs(SAMPLER, PROXIMAL, TRAINER)
    call = centered_call(correction=CAPPED, head=(sampler, trainer, proximal * math.nan))
    with pytest.raises(NonFiniteError, match="head: expected finite log-probs of the proximal policy, got n"):
        slime_ext.correct(**call)


def test_single_log_probs_above_0_are_rejected_and_no_probabilities():
    sample = {k: [-1.0, -2.0] for k in ("proximal", "behavior", "target", "advantage", "host_loss")}
    call = flat_call([sample | {"mask": [1, 1]}], correction="token_tis")
    for behavior in ([0.7, -1.0], [1.5, 0.7], [math.nan, math.nan]):
        values = torch.tensor(behavior, dtype=torch.float64)
        keep = slime_ext.correct(**call | {"behavior": values})[1]
        assert keep.tolist() == [False, behavior[1] < 0]
    certain = {k: [0.0, 1e-3] for k in ("proximal", "behavior", "target", "advantage", "host_loss")}
    call = flat_call([certain | {"mask": [1, 1]}], correction="token_tis")
    assert slime_ext.correct(**call)[1].all()

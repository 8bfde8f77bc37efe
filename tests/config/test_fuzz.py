"""Random mappings on random batches, against loops that read the same mapping: weights, keep flags, loss, and
a gradient that flows through the surrogate alone; in float32 everything is finite.

Mappings that the loader refuses are drawn again. To see one case alone: its seed.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import math
import random
from pathlib import Path

import pytest
import torch
import yaml

from slime_ext import load_config, tis
from slime_ext.core.correction import HookInputs, apply
from slime_ext.core.losses import Bounds
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.tokens import Tokens
from slime_ext.errors import ConfigError, DataError
from slime_ext.ops.segments import Segments
from tests import oracle
from tests.config import fuzz_oracle
from tests.test_layering import imported
from tests.test_tis import arguments, as_slime_calls

CASES, PER_TEST = 240, 40
UNITS, LEVELS = ("token", "turn", "sequence"), ("token", "turn", "sequence", "geometric")
STATISTICS = ("ratio", "k1", "k2", "k3", "binary_kl", "binary_kl_max", "tv")
LOG_PROBS = ("proximal", "behavior", "target")
NOTHING = (math.nan, math.inf, -math.inf, 1e30)
NO_LOG_PROB = (math.nan, math.inf, -math.inf, -9999.0, 0.7)


# ---- mappings ----


def caps(rng):
    return rng.choice([1.0, 1.001, 1.5, 2.0, 20.0, 1e9, 1e30])


def floors(rng):
    return rng.choice([0.0, 1e-30, 0.1, 0.5, 0.999, 1.0])


def scope(rng):
    return rng.choice([{}, {"over": "kept"}]) | rng.choice([{}, {}, {"clamp": rng.choice([0.3, 5.0, 20.0])}])


def rejection(rng):
    statistic = rng.choice(STATISTICS)
    neutral = 1.0 if statistic == "ratio" else 0.0
    high = neutral + rng.choice([1e-3, 0.05, 0.5, 9.0, 1e20])
    low = floors(rng) if statistic == "ratio" else -rng.choice([0.01, 3.0])
    found = {
        "unit": rng.choice(UNITS),
        "statistic": statistic,
        "aggregate": rng.choice(["sum", "mean", "max"]),
    }
    found |= rng.choice([{"high": high}, {"high": high}, {"low": low}, {"low": low, "high": high}])
    found |= rng.choice([{}, {}, {}, {"when": rng.choice(["negative_advantage", "outward"])}])
    stale = [{"max_staleness": rng.randint(0, 3)}, {"max_staleness_steps": rng.randint(0, 9)}]
    found |= rng.choice([{}] * 8 + stale)
    found |= scope(rng)
    return {"reject": found}


def weighting(rng):
    signed = {"positive_high": rng.choice([1.0, 3.0]), "negative_low": rng.choice([0.0, 0.2])}
    return rng.choice(
        [{"reweight": {"level": rng.choice(LEVELS), **scope(rng)}}] * 4
        + ["min_prefix_reweight", {"signed_clip": {"level": rng.choice(LEVELS), **signed}}]
    )


def bounding(rng):
    return rng.choice(
        [
            {"truncate": {"high": caps(rng)}},
            {"clip": {"low": floors(rng), "high": caps(rng)}},
            {
                "zero_outside": {
                    "unit": rng.choice(UNITS),
                    "aggregate": rng.choice(["sum", "mean"]),
                    "high": caps(rng),
                }
            },
        ]
    )


def surrogate(rng):
    anchor = {"anchor": rng.choice(["proximal", "behavior"])}
    width = {"eps_low": rng.choice([0.0, 0.2, 1.5]), "eps_high": rng.choice([0.01, 0.28, 1e9])}
    ours = {
        "ppo_clip": anchor | width,
        "dual_clip": {**anchor, **width, "eps_c": rng.choice([1.1, 3.0])},
        "sapo": {**anchor, "tau_pos": rng.choice([1e-3, 1.0, 50.0])},
    }
    return rng.choice(["host", "host", "reinforce", *({name: fields} for name, fields in ours.items())])


def mapping_of(rng):
    """Rejections anywhere; weights and what bounds them in their order, as they are configured. One number in
    a few mappings is replaced by one that hardly makes sense: it is refused, or it does what the loops do."""
    weights = [weighting(rng)] if rng.random() < 0.8 else []
    weights += [bounding(rng) for _ in range(rng.randint(0, 2))] if weights else []
    weights += [{"normalize": {"level": rng.choice(["token", "sequence"])}}] if rng.random() < 0.2 else []
    others = [rejection(rng) for _ in range(rng.randint(0, 2))]
    others += [{"veto": rng.choice([{"low": 1e-4}, {"high": 50.0}, {"low": 1e-30, "high": 3.0}])}] * (
        rng.random() < 0.2
    )
    others += [{"second_moment": {"threshold": rng.choice([1e-6, 0.04, 3.0])}}] * (rng.random() < 0.15)
    places = sorted(rng.choices(range(len(weights) + 1), k=len(others)), reverse=True)
    for place, step in zip(places, others, strict=True):
        weights.insert(place, step)
    found = {
        "numerator": rng.choice(["proximal", "proximal", "target"]),
        "surrogate": surrogate(rng),
        "steps": weights,
    }
    if rng.random() < 0.3:
        owners = [fields for name in (*weights, found["surrogate"]) for fields in numeric(name)]
        for fields, key in rng.sample(owners, min(1, len(owners))):
            fields[key] = rng.choice([-1.0, -0.5, 0.0, 1.0, 1e40, 1e-40])
    return yaml.load(yaml.dump(found, Dumper=yaml.CSafeDumper), yaml.CSafeLoader)  # libyaml's, for speed


def numeric(entry):
    """The numbers of a step or a surrogate, as the mapping that holds them and their key."""
    fields = next(iter(entry.values())) if isinstance(entry, dict) else {}
    return [(fields, key) for key, value in fields.items() if isinstance(value, float)]


# ---- batches ----


def batch_of(rng):
    """Sequences of 0 to 70 tokens: near, far and as far as log-probs go; anything at masked tokens."""
    return [sequence(rng, rng.choice([0, 1, 2, 3, 5, 9, 33, 70])) for _ in range(rng.randint(1, 5))]


def sequence(rng, n):
    spread, base = rng.choice([0.0, 1e-4, 0.05, 1.0, 30.0]), rng.choice([0.01, 1.0, 40.0])
    s = {
        "proximal": [-rng.expovariate(1 / base) for _ in range(n)],
        "age": rng.choice([0.0, 1.0, 4.0, math.nan]),
        "age_steps": rng.choice([0.0, 3.0, 12.0, math.nan]),
    }
    for name in ("behavior", "target"):
        s[name] = [min(x + rng.gauss(0, spread), 0.0) for x in s["proximal"]]
    if n > 1 and rng.random() < 0.2:
        balance(rng, s)
    advantage = rng.choice([-1.0, 0.0, 0.5, 3.0])
    s["advantage"] = [advantage * rng.choice([1.0, 1.0, 1.0, 1e-20, 30.0]) for _ in range(n)]
    s["host_loss"] = [rng.gauss(0, 1) * rng.choice([0.0, 1.0, 1.0, 1e4]) for _ in range(n)]
    s["mask"] = mask(rng, n)
    for i in range(n):
        if rng.random() < 0.03:
            s[rng.choice(LOG_PROBS)][i] = -rng.choice([90.0, 300.0, 900.0])
        if rng.random() < 0.01:
            s["behavior"][i] = rng.choice(NO_LOG_PROB)
        if not s["mask"][i]:
            for name in (*LOG_PROBS, "advantage", "host_loss"):
                s[name][i] = rng.choice([*NOTHING, s[name][i]])
    return s


def balance(rng, s):
    """One ratio is far, the others make up for it: their product and their mean are near 1."""
    n, far = len(s["proximal"]), rng.choice([30.0, 95.0, 400.0, 800.0])
    for i in range(n):
        s["behavior"][i], s["proximal"][i] = (-1 - far, -1.0) if i == n // 2 else (-1.0, -1 - far / (n - 1))
        s["target"][i] = rng.choice([s["proximal"][i], -0.1])


def mask(rng, n):
    if rng.random() < 0.1:
        return [0] * n
    found, bit = [], rng.random() < 0.8
    while len(found) < n:
        found += [int(bit)] * rng.randint(1, 12)
        bit = not bit
    return found[:n]


def packed(batch, dtype):
    def flat(name):
        return torch.tensor([x for s in batch for x in s[name]], dtype=dtype).requires_grad_(name != "mask")

    segments = Segments.whole([len(s["mask"]) for s in batch], flat("mask").detach())
    ages = {
        name: torch.tensor([s[of] for s in batch], dtype=torch.float64)
        for name, of in (("ages", "age"), ("age_steps", "age_steps"))
    }
    given = {name: flat(name) for name in LOG_PROBS}
    return Tokens(segments, **given, advantages=flat("advantage"), **ages), flat("host_loss")


# ---- the comparison ----


def configured(seed):
    """The first mapping of a seed that the loader takes, and what it makes of it."""
    rng = random.Random(seed)
    for _ in range(100):
        mapping = mapping_of(rng)
        with contextlib.suppress(ConfigError):
            return mapping, load_config(mapping)
    raise AssertionError(f"seed {seed}: no mapping was taken")


def of_loops(batch, name):
    return torch.tensor([x for s in batch for x in s[name]], dtype=torch.float64)


def gradients(result, tokens, host_loss):
    """Of the sum of the losses, with respect to everything that went in; None for what it does not reach."""
    read = (host_loss, tokens.target, tokens.proximal, tokens.behavior, tokens.advantages)
    if not result.loss.requires_grad:
        return [None] * len(read)
    return torch.autograd.grad(result.loss.sum(), read, allow_unused=True)


def compare(correction, mapping, batch):
    expected = fuzz_oracle.corrected(mapping, copy.deepcopy(batch))
    tokens, host_loss = packed(batch, torch.float64)
    outcome = correction(tokens)
    assert outcome.keep.int().tolist() == of_loops(expected, "keep").int().tolist()
    result = apply(correction, HookInputs(tokens, host_loss))
    # Far ratios: e^x has the relative error of x.
    wanted = {"rtol": 1e-9, "atol": 1e-290}
    torch.testing.assert_close(result.weights, of_loops(expected, "weight"), **wanted)
    of_host, of_target, *others = gradients(result, tokens, host_loss)
    assert all(gradient is None for gradient in others)
    own, other = (of_host, of_target) if mapping["surrogate"] == "host" else (of_target, of_host)
    if correction.is_identity:
        assert result.loss is host_loss
        return
    assert other is None
    loss, slope = of_loops(expected, "loss"), of_loops(expected, "slope")
    most = 1e200  # above, a product is cut where it would overflow
    small = (loss.abs() < most) & (slope.abs() < most)
    torch.testing.assert_close(result.loss[small].detach(), loss[small], **wanted)
    torch.testing.assert_close(own[small], slope[small], **wanted)
    assert result.loss.isfinite().all() and own.isfinite().all()


def check_on_policy(correction, mapping, batch):
    """Equal log-probs: nothing is rejected, every weight is 1, the loss is the surrogate's own."""
    unknown = {"age": math.nan, "age_steps": math.nan}
    batch = [s | dict.fromkeys(("behavior", "target"), s["proximal"]) | unknown for s in batch]
    tokens, host_loss = packed(batch, torch.float64)
    outcome = correction(tokens)
    assert torch.equal(outcome.keep, tokens.segments.mask)
    assert (outcome.weights[outcome.keep] == 1).all()
    name, fields = fuzz_oracle.named(mapping["surrogate"], fuzz_oracle.SURROGATES)
    a, target = tokens.advantages, tokens.target
    value = {"host": host_loss, "reinforce": -a * target}.get(name, -a)
    if name == "sapo":
        value = -2 * a / torch.full_like(a, fields["tau_neg"]).masked_fill(a > 0, fields["tau_pos"])
    loss, _ = correction.loss(outcome, tokens, host_loss, Bounds())
    kept = outcome.keep
    torch.testing.assert_close(loss[kept], value[kept], rtol=1e-12, atol=1e-290)


def check_finite(correction, batch):
    tokens, host_loss = packed(batch, torch.float32)
    inputs = HookInputs(tokens, host_loss, layout=MetricsLayout.of(correction))
    result = apply(correction, inputs)
    if correction.is_identity:
        return
    found = [result.loss.detach(), *(x for x in gradients(result, tokens, host_loss) if x is not None)]
    assert all(x.isfinite().all() for x in found) and not result.weights.isnan().any()
    assert result.loss.detach().double().sum().float().isfinite()
    assert not result.measured.sums.isnan().any()


@pytest.mark.parametrize("first", range(0, CASES, PER_TEST))
def test_random_mappings_do_what_the_page_says(first):
    for seed in range(first, first + PER_TEST):
        mapping, correction = configured(seed)
        batch = batch_of(random.Random(1000 * seed))
        try:
            compare(correction, mapping, batch)
            check_finite(correction, batch)
            check_on_policy(correction, mapping, batch)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"seed {seed}: {yaml.safe_dump(mapping)}") from error


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_are_refused_or_mean_nothing(seed):
    """One of slime's lists gets another shape with the same numbers: one number per token, or a refusal."""
    rng = random.Random(seed)
    batch = [s for s in oracle.random_batch(seed, wild=False) if s["mask"]]
    call, args = as_slime_calls(batch), arguments(slime_ext={"preset": "pure_is"})
    expected, _, _ = tis.correct(args, **call)
    key = rng.choice(
        [name for name, value in call.items() if isinstance(value, list) and name[:5] != "total"]
    )
    place = rng.randrange(len(batch))
    if key == "response_lengths":
        call[key] = [*call[key][:place], call[key][place] + rng.choice([-1, 1]), *call[key][place + 1 :]]
    else:
        shape = rng.choice([(-1, 1), (1, -1), (-1, 1, 1)])
        call[key] = [*call[key][:place], call[key][place].view(shape), *call[key][place + 1 :]]
    with pytest.raises(DataError, match=f"sequence {place} of {len(batch)}: expected") as caught:
        tis.correct(args, **call)
    assert "\n" not in str(caught.value) and expected.dim() == 1


def test_the_loops_are_independent():
    tree = ast.parse(Path(fuzz_oracle.__file__).read_text())
    assert {name.split(".")[0] for name in imported(tree)} == {"__future__", "math", "tests"}
    assert {name for name in imported(tree) if name.startswith("tests")} == {
        *("tests", "tests.oracle", "tests.oracle.INF", "tests.oracle.exp")
    }

"""Every correction in plain torch against the hook: loss, gradients, weights and kept tokens."""

from __future__ import annotations

import ast
import functools
import random
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from slime_ext import presets
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction, HookInputs, apply
from slime_ext.core.losses import SURROGATES, Delightful, DualClip, PpoClip, Reinforce, Sapo
from slime_ext.core.prefix_steps import PREFIX_STEPS, PrefixBudget, PrefixReject, PrefixReweight
from slime_ext.core.scoped import ScopedReject
from slime_ext.core.steps import STEPS, Clip, Reject, Reweight, SignedClip, Truncate, Veto
from slime_ext.core.terms import TERMS, ReverseK3, SquaredLogRatio
from slime_ext.core.tokens import Head, Tokens
from slime_ext.errors import ConfigError
from slime_ext.ops.segments import Segments
from slime_ext.tools import plain_torch
from slime_ext.tools.plain_torch import function_of, obstacle
from tests import oracle
from tests.core.test_centering import K, with_heads

pytestmark = pytest.mark.xdist_group("plain torch")  # one worker keeps what the hook gives
COUPLED = {"m2": "steps[0] second_moment", "p3o": "steps[1] ess_truncate"}
PURE = {"numerator": "target", "surrogate": Reinforce()}
CENTERED = {**PURE, "center": Center(K)}
BAND = Reject("token", "ratio", low=0.8, high=1.2)
PRESETS = {name: preset.correction for name, preset in presets.PRESETS.items() if name not in COUPLED}
PRESETS |= {name: replace(each, center=Center(K)) for name, each in PRESETS.items() if each.center}
# What no preset has: other fields of the steps, other surrogates and terms, score centering.
OTHERS = {
    "geometric_clip": Correction(steps=(Reweight("geometric"), Clip(0.95, 1.05))),
    "turns_k1": Correction(steps=(Reject("turn", "k1", "mean", -0.02, 0.05),)),
    "turns_k3": Correction(steps=(Reject("turn", "k3", "sum", high=0.1),)),
    "largest_k2": Correction(steps=(Reject("sequence", "k2", "max", high=0.5),)),
    "tiny_kl": Correction(steps=(Reject("token", "binary_kl_max", high=1e-6),)),
    "large_budget": Correction(steps=(PrefixBudget("tv", 0.2, 0.5),), **PURE),
    "large_budget_k2": Correction(steps=(PrefixBudget("k2", 0.1, 0.5, 0.5, "always"),)),
    "largest_of_turns": Correction(steps=(Reject("turn", "ratio", "max", 0.999, 1.5),)),
    "largest_of_sequences": Correction(steps=(Reject("sequence", "k1", "max", -0.0001, 0.6),)),
    "largest_ratio": Correction(steps=(Reject("sequence", "ratio", "max", high=1.5),)),
    "outward_turns": Correction(steps=(Reject("turn", "tv", "mean", high=0.05, when="outward"),)),
    "outward_positive": Correction(
        steps=(Reject("sequence", "k2", "mean", high=0.001, when="outward_positive"),)
    ),
    "outward_negative": Correction(steps=(Reject("token", "k2", high=0.001, when="outward_negative"),)),
    "positive": Correction(steps=(Reject("token", "k1", low=-0.1, high=0.2, when="positive_advantage"),)),
    "signed_turns": Correction(steps=(SignedClip("turn", 0.9, 1.2, 0.5, 1.1),)),
    "veto_high": Correction(steps=(Veto(high=1.6), Reweight())),
    "prefix_mean": Correction(
        steps=(PrefixReweight("mean"), PrefixReject("k3", "mean", high=0.02, growth="sqrt"))
    ),
    "prefix_budget": Correction(steps=(PrefixBudget("k2", 0.1, 0.01, 0.5, "always"),)),
    "decoupled": Correction(surrogate=PpoClip(eps_low=0.1), steps=(Reweight(), Truncate(2.0))),
    "dual": Correction(surrogate=DualClip(eps_low=0.05, eps_high=0.3)),
    "dual_own": Correction(surrogate=DualClip("behavior", eps_c=1.2), numerator="target"),
    "sapo": Correction(surrogate=Sapo(tau_pos=2.0), steps=(Reweight("sequence"), Truncate(1.5))),
    "delightful_half": Correction(surrogate=Delightful(0.5)),
    "terms": Correction(
        steps=(Reweight(), BAND, Veto(low=0.3)), terms=(SquaredLogRatio(0.1), ReverseK3(0.5))
    ),
    # On-policy tokens lie exactly at these bounds, and the ends are inside.
    "low_end_of_tokens": Correction(steps=(Reject("token", "ratio", low=1.0),)),
    "high_end_of_tokens": Correction(steps=(Reject("token", "ratio", high=1.0),)),
    "low_end_of_sequences": Correction(steps=(Reject("sequence", "ratio", "max", low=1.0),)),
    "high_end_of_sequences": Correction(steps=(Reject("sequence", "ratio", "max", high=1.0),)),
    "low_end_of_a_veto": Correction(steps=(Veto(low=1.0),)),
    "high_end_of_a_veto": Correction(steps=(Veto(high=1.0),)),
    "low_end_of_prefixes": Correction(steps=(PrefixReject("tv", low=0.0, high=0.1),)),
    "ends_of_a_budget": Correction(steps=(PrefixBudget("tv", 0.0, 0.1, 0.5, "always"),)),
    "centered": Correction(**CENTERED),
    "centered_capped": Correction(steps=(Reweight(), Truncate(1.1)), **CENTERED),
    "centered_band": Correction(steps=(Reweight(), BAND), **CENTERED),
    "centered_outward": Correction(
        steps=(Reweight(), Reject("token", "tv", high=0.05, when="outward")), **CENTERED
    ),
    "centered_sequences": Correction(
        steps=(Reweight("sequence"), Truncate(1.05), BAND, Reject("sequence", "ratio", "mean", 0.9, 1.1)),
        **CENTERED,
    ),
}
WRITTEN = {**PRESETS, **OTHERS}
SWEEP = 5  # with fewer, test_every_line_and_number_of_the_text_is_compared fails
SEEDS = range(SWEEP + 1)
FIELDS = ("loss", "behavior", "proximal", "target", "advantages", "mask", "sampler_head", "trainer_head")
LEAVES = ("loss", "proximal", "target", "trainer_head")


def sweep():
    """Responses whose log-ratios have all sizes: in every token, in one, and in two that add up to 0."""
    rng = random.Random(0)
    sizes = [*(1e-5 * 1.4**i for i in range(27)), *(0.1 * 1.3**i for i in range(22))]
    responses = [
        response
        for size in (sign * size for size in sizes for sign in (-1, 1))
        for response in ([size] * 5, [1e-6, size, 0.0, 1e-6, 0.0], [size, -size, 0.0, 1e-6, 0.0])
    ]
    swept = [sequence(rng, response) for response in [*[[0.0] * 5] * 3, *responses]]
    for i, no_log_prob in enumerate((0.015, -1500.0)):
        swept[i]["behavior"][1] = no_log_prob
    return swept


def sequence(rng, log_ratios):
    base = [rng.choice([-1e-9, -0.02, -0.7, -3.0, -13.0]) for _ in log_ratios]
    numerator = [x + min(log_ratio, 0) for x, log_ratio in zip(base, log_ratios, strict=True)]
    return {
        "proximal": numerator,
        "target": numerator,
        "behavior": [x - max(log_ratio, 0) for x, log_ratio in zip(base, log_ratios, strict=True)],
        "advantage": [rng.choice([-1.3, 0.7])] * len(log_ratios),
        "host_loss": [rng.gauss(0, 1) for _ in log_ratios],
        "mask": [1, 1, 0, 1, 1],
    }


@functools.cache
def made(seed):
    return sweep() if seed == SWEEP else oracle.random_batch(seed)


@functools.cache
def batch(seed):
    """Responses with masked, broken and extreme tokens, and a head at each token."""
    packed, loss = with_heads(made(seed), seed)
    values = (loss, packed.behavior, packed.proximal, packed.target, packed.advantages, packed.segments.mask)
    heads = packed.head.sampler, packed.head.trainer
    if seed == SWEEP:  # the sampler's heads are its whole vocabulary
        heads = heads[0].log_softmax(1), heads[1]
    return [len(s["mask"]) for s in made(seed)], dict(zip(FIELDS, (*values, *heads), strict=True))


def leaves(seed):
    """The lengths, and the tensors with gradients of their own."""
    lengths, values = batch(seed)
    fresh = {name: value.detach().clone() for name, value in values.items()}
    return lengths, {name: v.requires_grad_() if name in LEAVES else v for name, v in fresh.items()}


def results(loss, weight, keep, values):
    gradients = torch.autograd.grad(
        loss.sum(), [values[name] for name in LEAVES], allow_unused=True, materialize_grads=True
    )
    return loss.detach(), weight, keep, *gradients


@functools.cache
def of_the_hook(correction, seed):
    lengths, values = leaves(seed)
    segments = Segments.whole(lengths, values["mask"])
    head = Head(values["sampler_head"], values["trainer_head"])
    packed = Tokens(
        segments,
        values["proximal"],
        values["behavior"],
        values["target"],
        values["advantages"],
        head=head,
    )
    result = apply(correction, HookInputs(packed, values["loss"]))
    keep = packed.segments.mask & (result.rejected == 0)
    return results(result.loss, result.weights, keep, values)


def of_the_text(source, name, seed):
    names = {}
    exec(source, names)
    function, (lengths, values) = names[name], leaves(seed)
    read = [
        field for field in FIELDS if field in function.__code__.co_varnames[: function.__code__.co_argcount]
    ]
    columns = [torch.split(values[field], lengths) for field in read]
    parts = [function(**dict(zip(read, row, strict=True))) for row in zip(*columns, strict=True)]
    return results(*(torch.cat(column) for column in zip(*parts, strict=True)), values)


def differs(source, name, correction):
    """Whether the text gives other numbers than the hook, or does not run."""
    for seed in SEEDS:
        try:
            found = of_the_text(source, name, seed)
        except Exception:
            return True
        for got, wanted in zip(found, of_the_hook(correction, seed), strict=True):
            if not torch.allclose(got.double(), wanted.double(), rtol=1e-9, atol=1e-12, equal_nan=True):
                return True
    return False


@pytest.mark.parametrize("name", WRITTEN)
def test_the_text_gives_the_loss_gradients_weights_and_kept_tokens_of_the_hook(name):
    source = function_of(name, WRITTEN[name], "formula")
    for seed in SEEDS:
        for got, wanted in zip(
            of_the_text(source, name, seed), of_the_hook(WRITTEN[name], seed), strict=True
        ):
            torch.testing.assert_close(
                got, wanted, rtol=1e-9, atol=1e-12, equal_nan=True, check_dtype=False, msg=f"seed {seed}"
            )


def changed(source):
    """What was changed, and what writes the source, which has to be called before the next change.

    Each statement is left out, and each number is doubled and halved.
    """
    tree = ast.parse(source)
    function = tree.body[-1]
    blocks = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef)]
    for block in blocks:
        for i, statement in enumerate(block.body):
            if i or block is not function:  # not the docstring
                kept = block.body
                block.body = [*kept[:i], ast.Pass(), *kept[i + 1 :]]
                yield f"without {ast.unparse(statement)}", partial(ast.unparse, tree)
                block.body = kept
    numbers = [
        (statement, node)
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value < 1e30
    ]
    for statement, node in numbers:
        value = node.value
        what = f"another number than {value} in {ast.unparse(statement)}"
        for node.value in (value * 2, value / 2 or 0.5):
            yield what, partial(ast.unparse, tree)
        node.value = value


def test_every_line_and_number_of_the_text_is_compared():
    """A line may do nothing in one correction, as a cap at 2 beside a rejection above 2, but not in all."""
    is_seen = defaultdict(bool)
    for name, correction in WRITTEN.items():
        for what, source in changed(function_of(name, correction, "formula")):
            is_seen[what] = is_seen[what] or differs(source(), name, correction)
    assert len(is_seen) > 200 and all(is_seen.values()), [what for what in is_seen if not is_seen[what]]


def test_every_step_loss_and_term_has_lines_or_needs_the_whole_optimizer_step():
    written = plain_torch.STEP_LINES | plain_torch.LOSS_LINES | plain_torch.TERM_LINES
    classes = {**STEPS, **PREFIX_STEPS, **SURROGATES, **TERMS}
    assert {name for name, cls in classes.items() if cls not in written} == {
        "second_moment",
        "normalize",
        "ess_truncate",
    }
    assert {name for name, preset in presets.PRESETS.items() if obstacle(preset.correction)} == set(COUPLED)


@pytest.mark.parametrize("name", COUPLED)
def test_a_coupled_step_is_named_with_its_code(name):
    with pytest.raises(
        ConfigError, match=re.escape(f"{name}: expected a correction of one response")
    ) as error:
        function_of(name, presets.get(name), "formula")
    message = str(error.value)
    assert f"got {COUPLED[name]}, which needs one number of the whole optimizer step" in message
    step = message.rpartition(": read ")[2].split()
    assert f"class {step[0]}(" in (Path(__file__).parents[2] / step[2]).read_text()


@pytest.mark.parametrize(
    ("correction", "part"),
    [
        (
            Correction(steps=(BAND, ScopedReject("sequence", high=2.0, over="kept"))),
            r"steps\[1\] reject, which has no lines",
        ),
        (Correction(steps=(Reject(max_staleness=2),)), r"steps\[0\] reject, which reads the age"),
        (Correction(steps=(BAND,), denominator="kept"), "denominator: kept"),
        (Correction(steps=(BAND,), group="atomic"), "group: atomic"),
    ],
)
def test_what_has_no_lines_is_refused(correction, part):
    with pytest.raises(ConfigError, match=f"own: expected .* got {part}.*: read "):
        function_of("own", correction, "formula")


def test_the_text_raises_where_the_correction_does():
    correction = Correction(steps=(Reweight(),), on_nonfinite="raise")
    names, zero, mask = {}, torch.zeros(1), torch.ones(1)
    exec(function_of("own", correction, "formula"), names)
    names["own"](zero, zero, zero, mask)
    with pytest.raises(AssertionError, match="behavior"):
        names["own"](zero, zero - torch.inf, zero, mask)

"""Breaks the mathematics on purpose, one line at a time, and expects the tests to notice.

    python tests/mutations.py [NAME ...]

Each mutation replaces one piece of text in a copy of the package and runs the tests that should fail and that
pass without it. Prints one line per mutation; exits with 1 if any survives or cannot be tried. Not part of
the test run: takes minutes.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class CannotRun(Exception):
    """Says why it is unknown whether the tests see a mutation."""


class Mutation(NamedTuple):
    file: str
    before: str
    after: str
    tests: str


SUITE = "tests/test_presets.py tests/core/test_correction.py"
CONTEXT_PARALLEL = "tests/host/test_context_parallel.py"
MUTATIONS = {
    "multiply instead of select": Mutation(
        "ops/segments.py", "torch.where(self.mask, values, 0)", "values * self.mask", "tests/ops"
    ),
    "count tokens of a tool as clipped": Mutation(
        "core/metrics/measure.py",
        "(outcome.clipped & segments.mask)",
        "outcome.clipped",
        "tests/core/metrics",
    ),
    "exclude the rejection bound": Mutation(
        "core/steps.py", "inside = value <= high", "inside = value < high", "tests/core/test_steps.py"
    ),
    "forget the detach": Mutation(
        "ops/divergences.py",
        "= detached(numerator).to(dtype)",
        "= numerator.to(dtype)",
        "tests/ops",
    ),
    "the prefix includes the token": Mutation("ops/prefixes.py", "torch.inf).roll(1)", "torch.inf)", SUITE),
    "reject whatever the sign": Mutation(
        "core/steps.py", "return advantage < 0", "return advantage < torch.inf", SUITE
    ),
    "inward for outward": Mutation("core/steps.py", '"sum", "ratio") > 0', '"sum", "ratio") < 0', SUITE),
    "touch the loss without --use-tis": Mutation(
        "host/hook.py", 'return bool(getattr(args, "use_tis", False)) and ', "return ", "tests/test_tis.py"
    ),
    "count a recomputed loss twice": Mutation(
        "host/step_metrics.py",
        "self.seen.setdefault(identities, objects)",
        "pass",
        "tests/host/test_train_step.py",
    ),
    "the smallest is the largest": Mutation(
        "core/metrics/names.py",
        '_extreme("log_ratio_min", -1)',
        '_extreme("log_ratio_max", 1)',
        "tests/core/metrics/test_statistics.py",
    ),
    "a guard counts steps that are not in a row": Mutation(
        "core/metrics/guards.py", "self.outside.pop(name, None)", "pass", "tests/core/metrics/test_guards.py"
    ),
    "metrics only goes on correcting": Mutation(
        "host/hook.py",
        " and not step.leaves_loss_alone",
        "",
        "tests/host/test_train_step.py",
    ),
    "a probability of 1.3 counts": Mutation(
        "ops/divergences.py", "HIGHEST = 0.01", "HIGHEST = 0.3", "tests/host/test_packing.py"
    ),
    "a number for minus infinity counts": Mutation(
        "ops/divergences.py", "LOWEST = -1e3", "LOWEST = -1e4", "tests/host/test_packing.py"
    ),
    "the bound of what is no log-prob counts": Mutation(
        "ops/divergences.py",
        "(values, LOWEST, 1.0)",
        "(values, LOWEST - 1e-4, 1.0)",
        "tests/host/test_packing.py",
    ),
    "a number below the lowest log-prob becomes one": Mutation(
        "ops/divergences.py", "(values, LOWEST, 1.0)", "(values, LOWEST, 0.0)", "tests/host/test_packing.py"
    ),
    "multiply numbers instead of their bits": Mutation(
        "ops/segments.py",
        "(values.view(integers(values)) * flags)",
        "(values * flags)",
        "tests/ops",
    ),
    "an idle step passes": Mutation(
        "core/idle.py", "if not changed and not rejected:", "if False:", "tests/core/test_idle.py"
    ),
    "a weight that is undone passes": Mutation(
        "core/idle.py",
        "if Effect.REWEIGHT in step.effects and Effect.REWEIGHT in earlier.effects:",
        "if False:",
        "tests/core/test_idle.py",
    ),
    "Python takes any word": Mutation(
        "core/correction.py", 'check_fields("", correction)', "pass", "tests/core/test_idle.py"
    ),
    "a head's mass may be 2": Mutation(
        "host/rollout_heads.py", "MASS = 1.0001", "MASS = 2.0", "tests/host/test_heads.py"
    ),
    "a support may lack half of its mass": Mutation(
        "host/rollout_heads.py", "LEAST_MASS = 0.999", "LEAST_MASS = 0.5", "tests/host/test_heads.py"
    ),
    "a support without the sampled token": Mutation(
        "host/rollout_heads.py",
        "(outside := counts & ~is_sampled.any(1)).any()",
        "False",
        "tests/host/test_heads.py",
    ),
    "a block forgets its first row": Mutation(
        "host/rollout_heads.py",
        "start, widest = row, width",
        "start, widest = row, 0",
        "tests/host/test_heads.py",
    ),
    "ids and log-probs of a binary head change places": Mutation(
        "host/engine_answers.py",
        "return ids.view(rows, width), log_probs.view(rows, width)",
        "return log_probs.view(rows, width), ids.view(rows, width)",
        "tests/host/test_heads.py",
    ),
    "any sampling beside a head": Mutation(
        "host/rollout_heads.py", "not in (None, wanted):", "is NotImplemented:", "tests/host/test_heads.py"
    ),
    "a capped weight is centered to 0": Mutation(
        "rules/of_center.py", "split(correction.steps)[0] != (Reweight(),)", "False", "tests/rules"
    ),
    "SkyRL's centering is left out": Mutation(
        "tools/convert/skyrl.py",
        '{**reading.mapping, "center": {"top_k": top_k}}',
        "{**reading.mapping}",
        "tests/tools/convert/test_centering.py",
    ),
    "verl's default trainer divides by kept tokens": Mutation(
        "tools/convert/verl.py", "if uses_v1 is False:", "if True:", "tests/peers/test_peers.py"
    ),
    "an ignored setting has no note": Mutation(
        "tools/convert/__init__.py",
        "if unread := values.unread():",
        "if unread := []:",
        "tests/peers/test_peers.py",
    ),
    "the adapter forgets the tokens that verl counted": Mutation(
        "adapters/verl.py",
        "weights = weights * (mask.sum() / kept.sum().clamp(min=1))",
        "weights = weights * 1",
        "tests/peers/test_peers.py",
    ),
    "a transposed tensor is flattened": Mutation(
        "adapters/seam.py",
        "mask.dim() != 2 or values.shape != mask.shape",
        "values.numel() != mask.numel()",
        "tests/adapters/test_seams.py",
    ),
    "the bins begin with 1 token": Mutation(
        "core/metrics/measure.py",
        "table = torch.zeros(len(rows), bins, lanes",
        "table = torch.ones(len(rows), bins, lanes",
        "tests/core/metrics",
    ),
    "padding unknown": Mutation(
        "hosts/slices.py", "(padded_length or total_length)", "total_length", "tests/host/test_packing.py"
    ),
    "ratios without a limit": Mutation(
        "ops/surrogates.py", "log_ratio.clamp(max=most)", "log_ratio", "tests/core/test_correction.py"
    ),
    "a surrogate of rejected tokens": Mutation(
        "core/correction.py",
        "self.surrogate(LossInputs(tokens, outcome.keep)",
        "self.surrogate(LossInputs(tokens, outcome.finite)",
        SUITE,
    ),
    "versions digit by digit": Mutation(
        "hosts/contract.py", " or isinstance(value, str)", "", "tests/host/test_rollout_log.py"
    ),
    "a stage that keeps its reason": Mutation(
        "host/step_metrics.py",
        "return max(reasons)",
        "return reason",
        "tests/host/test_metrics_layouts.py",
    ),
    "no word of the floor": Mutation(
        "tools/convert/verl_levels.py", "(FLOOR, *notes)", "(*notes,)", "tests/tools/convert/test_blocks.py"
    ),
    "flip the ratio": Mutation(
        "ops/divergences.py",
        "select_(numerator - behavior, finite)",
        "select_(behavior - numerator, finite)",
        SUITE,
    ),
    "a veto's limit with the other sign": Mutation(
        "core/statistics.py",
        "torch.rsub(self.log_ratio, -of.limit)",
        "torch.rsub(self.log_ratio, of.limit)",
        SUITE,
    ),
    "a step compares before it checks types": Mutation(
        "core/steps.py",
        'check_fields("truncate.", self, Truncate)',
        "pass",
        "tests/core/test_idle.py",
    ),
    "drop the mask": Mutation(
        "ops/divergences.py",
        "= mask & is_log_prob(behavior)",
        "= is_log_prob(behavior)",
        SUITE,
    ),
    "< for <=": Mutation(
        "core/steps.py", "square() <= inputs.plan", "square() < inputs.plan", "tests/core/test_correction.py"
    ),
    "skip the all-reduce": Mutation(
        "core/statistics.py", "if shares and all_sum is not identity", "if False", CONTEXT_PARALLEL
    ),
    "clamp at 20": Mutation(
        "core/steps.py",
        'inputs.total(self.unit, self._aggregate, "ratio")',
        'inputs.total(self.unit, self._aggregate, "ratio").clamp(-20, 20)',
        SUITE,
    ),
    "turns run on through sequences": Mutation(
        "ops/segments.py", ".index_fill(0, host_ints(begins, self.full_mask.device), False)", "", "tests/ops"
    ),
    "keep what is not finite": Mutation(
        "core/state.py", "keep[unit] = finite == count", "keep[unit] = finite <= count", SUITE
    ),
    "k3 of the other direction": Mutation(
        "ops/divergences.py", "(ratio_minus_one - log_ratio)", "(ratio_minus_one + log_ratio)", SUITE
    ),
    "a sequence is added in float32": Mutation(
        "ops/segments.py",
        'segment_reduce(row.double(), "sum", offsets=self.bounds, unsafe=True, initial=0)',
        'segment_reduce(row.float(), "sum", offsets=self.bounds, unsafe=True, initial=0).double()',
        "tests/ops",
    ),
    "a shard forgets the minima before it": Mutation(
        "ops/prefixes.py", "torch.cat([first, lowest[:, :-1]], 1)", "lowest.clone()", "tests/ops"
    ),
    "divide by a sample's own kept tokens": Mutation(
        "host/rollout_data.py",
        "kept[key] += row.kept",
        "kept[key] = row.kept",
        "tests/host/test_rollout_data.py",
    ),
    "an atomic group keeps its tokens in the denominator": Mutation(
        "host/step_plan.py",
        "row._replace(kept=row.kept * (row.group not in broken))",
        "row",
        "tests/host/test_step_plan.py",
    ),
    "count shared sequences on every rank": Mutation(
        "core/metrics/measure.py",
        "if not (counts_sequences and tokens.segments.count):",
        "if not tokens.segments.count:",
        "tests/core/metrics",
    ),
    "a step's rejections depend on the others": Mutation(
        "core/state.py",
        'StepRecord(self.step, "kept", unit, inside)',
        'StepRecord(self.step, "kept", unit, kept)',
        "tests/core/metrics",
    ),
    "read ahead and go on from there": Mutation(
        "host/rollout_data.py", "iterator.offset = at", "pass", "tests/host/test_step_plan.py"
    ),
    "a group ends with its optimizer step": Mutation(
        "host/step_plan.py", '    if others["loss_masks"]:', "    if False:", "tests/host/test_step_plan.py"
    ),
    "an age counts from the newest weights": Mutation(
        "host/rollout_data.py", "else min(versions", "else max(versions", "tests/host/test_staleness.py"
    ),
    "optimizer steps since the process began": Mutation(
        "host/certify.py", "float(self.steps - before)", "float(self.steps)", "tests/host/test_staleness.py"
    ),
    "ages of weights to come": Mutation(
        "host/staleness.py", " or v > current", "", "tests/host/test_staleness.py"
    ),
    "a loss of any length": Mutation(
        "host/hook.py",
        'require_flat("pg_loss", call.pg_loss, tokens.segments.size)',
        "pass",
        "tests/test_tis.py",
    ),
    "products without a limit": Mutation(
        "core/correction.py",
        "largest_product(largest.dtype) / largest.clamp_min(1)",
        "torch.full_like(largest, 1e38)",
        "tests/core/test_correction.py",
    ),
    "a ratio without a limit": Mutation(
        "core/correction.py",
        "outcome.ratio.clamp(max=LARGEST_RATIO[4])",
        "outcome.ratio",
        "tests/test_tis.py",
    ),
    "k3 below 0": Mutation(
        "core/metrics/measure.py",
        "torch.clamp(k3(log_ratio, ratio_minus_one), max=most, out=divergence)",
        "divergence.copy_(k3(log_ratio, ratio_minus_one))",
        "tests/core/metrics",
    ),
    "a masked token is an extreme": Mutation(
        "core/metrics/measure.py",
        "log_ratio.masked_fill(uncounted, -torch.inf)",
        "log_ratio",
        "tests/core/metrics",
    ),
    "a curve's bin begins one later": Mutation(
        "core/metrics/measure.py", "values >= edge", "values > edge", "tests/core/metrics"
    ),
    "positions of a shard from 0 on": Mutation(
        "core/metrics/measure.py", "before[:, 1] - before[:, 0]", "before[:, 1]", "tests/core/metrics"
    ),
    "what is kept forgets the steps before": Mutation(
        "core/metrics/measure.py", "step <= effect.step", "step == effect.step", "tests/core/metrics"
    ),
    "the tail is not modelled": Mutation(
        "ops/centering.py", "alpha * g[:, -1:]", "g[:, -1:]", "tests/ops/test_centering.py"
    ),
    "the tail's ratio upside down": Mutation(
        "ops/centering.py", "q_tail / p_tail", "p_tail / q_tail", "tests/ops/test_centering.py"
    ),
    "centering without its advantage's slope": Mutation(
        "ops/centering.py",
        "slopes[0][:, None] * coefficients",
        "coefficients",
        "tests/core/test_centering.py",
    ),
    "a tail without a floor": Mutation(
        "ops/centering.py", "keepdim=True)).clamp_min(FLOOR)", "keepdim=True))", "tests/ops/test_centering.py"
    ),
    "the head at another temperature": Mutation(
        "host/heads.py",
        "at_rows, temperature=_temperature(named), ",
        "at_rows, ",
        "tests/downstream/test_heads.py",
    ),
    "the vocabulary's parts in one place": Mutation(
        "host/heads.py", '"offset": part * width', '"offset": 0', "tests/downstream/test_heads.py"
    ),
    "the heads of other samples": Mutation(
        "host/heads.py",
        "heads = [known[index] for index in samples.indices]",
        "heads = list(known.values())",
        "tests/host/test_heads.py",
    ),
    "the proximal policy's heads of other samples": Mutation(
        "host/heads.py",
        "return [known[index] for index in samples.indices]",
        "return list(known.values())",
        "tests/host/test_proximal_heads.py",
    ),
    "a reference is scored for the proximal policy": Mutation(
        "host/proximal_heads.py",
        'name == TARGET and not call["store_prefix"]',
        "name == TARGET",
        "tests/host/test_proximal_heads.py",
    ),
    "the host stores the heads": Mutation(
        "host/proximal_heads.py",
        "columns.pop(COLUMN)",
        "columns[COLUMN]",
        "tests/host/test_proximal_heads.py",
    ),
    "centering at a rejected sequence": Mutation(
        "core/correction.py",
        "counts = head_factor > 0",
        "counts = head_factor > -1",
        "tests/core/test_centering.py",
    ),
    "sequence factors leave the center alone": Mutation(
        "core/correction.py",
        "advantages * head_factor * term",
        "advantages * term",
        "tests/core/test_centering.py",
    ),
    "every step gives f": Mutation(
        "core/centering.py",
        'by_unit = of_tokens if step.unit == "token" and not step.statistics else of_units',
        "by_unit = of_tokens",
        "tests/core/test_centering.py",
    ),
    "a clipped candidate has a slope": Mutation(
        "core/losses.py",
        "return -signs * slope",
        "return torch.ones_like(slope)",
        "tests/core/test_centering.py",
    ),
    "candidates are weighted by the trainer's ratio": Mutation(
        "core/centering.py",
        'of = log_p if numerator == "target" else log_o',
        "of = log_p",
        "tests/core/test_centering.py",
    ),
    "the tail's proximal is the trainer's": Mutation(
        "ops/centering.py",
        "_tail(log_o.exp()).log()",
        "p_tail.log()",
        "tests/core/test_centering.py",
    ),
    "the sampler's probability is left out of a support": Mutation(
        "ops/centering.py",
        "coefficients = log_q.exp()",
        "coefficients = torch.ones_like(log_q)",
        "tests/ops/test_centering.py",
    ),
    "a support's gradient without its slope": Mutation(
        "ops/centering.py",
        "slopes[0].index_select(0, owner) * coefficients",
        "coefficients",
        "tests/ops/test_centering.py",
    ),
    "a support's gradient is not normalised": Mutation(
        "ops/vocabulary.py",
        "slope = slope - log_probs.exp() * segment_sums(slope, offsets).index_select(0, owner)",
        "",
        "tests/ops/test_centering.py",
    ),
    "a support's candidates of other ranks": Mutation(
        "ops/vocabulary.py",
        "torch.where(held, slope / ctx.temperature, 0)",
        "(slope / ctx.temperature)",
        "tests/ops/test_centering.py",
    ),
    "a mean weight divides the loss alone": Mutation(
        "core/centering.py",
        "isinstance(step, Normalize) or (bounds",
        "(bounds",
        "tests/core/test_centering.py",
    ),
    "a rejected group keeps its center": Mutation(
        "core/correction.py",
        'state = state.reject("sequence", plan.keep)\n        return',
        "pass\n        return",
        "tests/core/test_centering.py",
    ),
    "numbers of a step leave the candidates alone": Mutation(
        "core/correction.py",
        "numbers=outcome.numbers,",
        "numbers=dict.fromkeys(outcome.numbers, torch.ones(())),",
        "tests/core/test_centering.py",
    ),
    "the host's floor is forgotten": Mutation(
        "core/losses.py",
        "PpoClip() if bounds.c is None else DualClip()",
        "PpoClip()",
        "tests/core/test_centering.py",
    ),
    "an infinite weight where the clip acts": Mutation(
        "core/centering.py",
        "weights.clamp(max=most) * factor",
        "weights * factor",
        "tests/core/test_centering.py",
    ),
    "a head's log-probs over a rank's own part": Mutation(
        "ops/vocabulary.py",
        "table[:, :parts].logsumexp(1, keepdim=True)",
        "table[:, part : part + 1]",
        "tests/ops/test_centering.py",
    ),
    "a prefix without its token": Mutation(
        "ops/prefixes.py",
        "running, distance = segments.zeroed(values).double(), 1",
        "running, distance = 0 * segments.zeroed(values).double(), 1",
        "tests/core/test_prefix_steps.py",
    ),
    "a prefix reaches into the sequence before": Mutation(
        "ops/prefixes.py",
        "torch.where(within >= distance, running.roll(distance), 0)",
        "running.roll(distance)",
        "tests/core/test_prefix_steps.py",
    ),
    "a shard forgets the sums before it": Mutation(
        "ops/prefixes.py",
        "return running + before.index_select(0, places)",
        "return running + 0 * before.index_select(0, places)",
        CONTEXT_PARALLEL,
    ),
    "masked tokens count in a prefix": Mutation(
        "ops/prefixes.py",
        "counts = mask.cumsum(0)",
        "counts = torch.ones_like(mask).cumsum(0)",
        "tests/core/test_prefix_steps.py",
    ),
    "a budget that forgets what was spent": Mutation(
        "core/prefix_steps.py",
        "(weighted <= self.high) & (spent <=",
        "(weighted <= self.high) & (weighted <=",
        "tests/core/test_prefix_steps.py",
    ),
    "bounds that do not grow": Mutation(
        "core/prefix_steps.py", 'self.growth == "sqrt"', "False", "tests/core/test_prefix_steps.py"
    ),
    "a cap from rejected tokens, too": Mutation(
        "core/steps.py", "inputs.usable.double().sum()])", "inputs.finite.double().sum() + 1])", SUITE
    ),
    "an all-reduce takes any tensor": Mutation(
        "host/ranks.py",
        "        require_contiguous(values)\n",
        "",
        CONTEXT_PARALLEL,
    ),
    "every rank holds a token": Mutation(
        "testing/steps.py",
        "split(whole, rank, prompt) for",
        "split(whole, rank) for",
        "tests/testing/test_steps.py",
    ),
    "a weight that underflows has no log": Mutation(
        "core/state.py",
        "torch.where(is_number, weights.log(), self.log_ratio.double())",
        "weights.clamp(max=dtype.max).log()",
        "tests/core/test_correction.py",
    ),
    "a weight outside the band keeps its log": Mutation(
        "core/scoped.py",
        "log_ratio = torch.where(inside, log_ratio, -torch.inf)",
        "pass",
        "tests/core/test_correction.py",
    ),
    "the largest weight of this rank alone": Mutation(
        "core/steps.py",
        "return all_sum((distance <= cuts).double()) == 0",
        "return (distance <= cuts).double() == 0",
        "tests/core/test_steps.py",
    ),
    "the center has a limit of its own": Mutation(
        "core/correction.py",
        "(_limited(x, loss, advantages * term)",
        "(_limited(x, loss)",
        "tests/core/test_centering.py",
    ),
    "a rejection may be thrown away": Mutation(
        "testing/steps.py",
        "if after is not returned and id(after) not in self.read",
        "if False",
        "tests/testing/test_steps.py",
    ),
    "a weight may be negative": Mutation(
        "testing/steps.py",
        "weights.isnan(), weights < 0",
        "weights.isnan(), weights < -1e300",
        "tests/testing/test_steps.py",
    ),
    "a step that bounds may undo weights": Mutation(
        "testing/steps.py",
        'sets = "reweight" in calls.leading_to(state)',
        "sets = False",
        "tests/testing/test_steps.py",
    ),
    "a cached property may be written to": Mutation(
        "testing/steps.py", "in fields + cached]", "in fields]", "tests/testing/test_steps.py"
    ),
    "a user's step may write to the wild batch": Mutation(
        "core/idle.py",
        "    if is_ours(step):\n        return state, inputs\n",
        "    if True:\n        return state, inputs\n",
        "tests/core/test_idle.py",
    ),
    "a clip may raise zeros": Mutation(
        "core/idle.py",
        "expect(not step.raises_zero, here,",
        "expect(True, here,",
        "tests/core/test_idle.py",
    ),
    "a band of a user's own goes with the weights": Mutation(
        "core/centering.py", " and not step.sets_zero", "", "tests/core/test_centering.py"
    ),
    "the center ignores what is kept": Mutation(
        "core/centering.py",
        'getattr(step, "over", "response") == "response"',
        "True",
        "tests/core/test_centering.py",
    ),
    "a turn with a NaN is empty": Mutation(
        "ops/segments.py", "held = table != -torch.inf", "held = table > -torch.inf", "tests/ops"
    ),
    "a ratio of 0 is no ratio": Mutation(
        "core/steps.py",
        "torch.where(lowest == torch.inf, 0, lowest)",
        "torch.where(lowest.isinf(), 0, lowest)",
        "tests/core/test_steps.py",
    ),
    "a bound may bound nothing": Mutation(
        "testing/steps.py",
        "over = weights > highest",
        "over = weights > torch.inf",
        "tests/testing/test_steps.py",
    ),
    "a tensor may be printed": Mutation(
        "testing/steps.py",
        "if func in (Tensor.__repr__, Tensor.__format__)",
        "if False",
        "tests/testing/test_steps.py",
    ),
    "k3 by the exponential": Mutation(
        "ops/divergences.py",
        "torch.expm1(log_ratio) if ratio",
        "torch.exp(log_ratio) - 1 if ratio",
        "tests/ops/test_equations.py",
    ),
    "swapped numbers of shards": Mutation(
        "host/packing.py",
        "numbers = (here.rank, 2 * here.size - 1 - here.rank)",
        "numbers = (2 * here.size - 1 - here.rank, here.rank)",
        "tests/host/test_packing.py",
    ),
    "a masked token is kept": Mutation(
        "config/flat.py",
        "segments.mask & (result.rejected == 0)",
        "result.rejected == 0",
        "tests/test_correct.py",
    ),
    "a tail of a thousandth at least": Mutation(
        "ops/centering.py", "FLOOR = 1e-6", "FLOOR = 1e-3", "tests/ops/test_centering.py"
    ),
    "a rank's part of the vocabulary has a token": Mutation(
        "ops/vocabulary.py",
        ".clamp_min(torch.finfo(some.dtype).min)",
        "",
        "tests/ops/test_centering.py",
    ),
    "an id of the next rank is this one's": Mutation(
        "ops/vocabulary.py",
        "(at < width)",
        "(at <= width)",
        "tests/ops/test_centering.py",
    ),
    "a token is in a head once": Mutation(
        "ops/vocabulary.py", "some.scatter_add_(1", "some.scatter_(1", "tests/ops/test_centering.py"
    ),
    "a step that reads its sequence gives f": Mutation(
        "core/centering.py", " and not step.statistics", "", "tests/core/test_centering.py"
    ),
    "a token may spend the budget at once": Mutation(
        "core/prefix_steps.py",
        "(weighted <= self.high) &",
        "(weighted <= self.high + self.budget) &",
        "tests/core/test_prefix_steps.py",
    ),
    "the budget of the token itself": Mutation(
        "core/prefix_steps.py",
        "granted = before - fall",
        "granted = before + 1 - fall",
        "tests/core/test_prefix_steps.py",
    ),
    "the sign of zero": Mutation(
        "core/steps.py", "return advantage >= 0", "return advantage > 0", "tests/core/test_steps.py"
    ),
    "terms at kept tokens alone": Mutation(
        "core/correction.py",
        "term(LossInputs(tokens, outcome.finite)",
        "term(LossInputs(tokens, outcome.keep)",
        "tests/test_presets.py",
    ),
    "a term that pushes": Mutation(
        "core/terms.py", "k3(-inputs.log_ratio", "k3(inputs.log_ratio", "tests/core/test_prefix_steps.py"
    ),
    "ess for what it lacks": Mutation(
        "core/terms.py", "return (1 - ess)", "return ess", "tests/core/test_prefix_steps.py"
    ),
    "the gate has a gradient": Mutation(
        "ops/surrogates.py",
        "-advantages * target_log_probs.detach() / eta",
        "-advantages * target_log_probs / eta",
        "tests/ops/test_equations.py",
    ),
    "the seeds' band excludes its bound": Mutation(
        "core/steps.py",
        "else value.clamp(low, high) == value",
        "else (value > low) & (value < high)",
        "tests/test_tis.py",
    ),
    "a page without its policy": Mutation(
        "tools/analysis/page/page.html.j2",
        'http-equiv="Content-Security-Policy"',
        'name="policy"',
        "tests/tools/analysis/test_report.py",
    ),
    "a pickle may call getattr": Mutation(
        "tools/analysis/readers/unpickle.py",
        '"numpy.ndarray": "ndarray",',
        '"numpy.ndarray": "ndarray", "builtins.getattr": getattr,',
        "tests/tools/analysis/test_readers.py",
    ),
    "half of the samples may be left out": Mutation(
        "tools/analysis/detectors/left_out.py",
        "LEFT_OUT = 0.01",
        "LEFT_OUT = 0.5",
        "tests/tools/analysis/test_gross.py",
    ),
    "unexplained by chance": Mutation(
        "tools/analysis/detectors/unexplained.py",
        "\nSURE = 3.0",
        "\nSURE = 0.0",
        "tests/tools/analysis/test_findings.py",
    ),
    "proximal heads in the order of the step": Mutation(
        "host/heads.py",
        "[step.proximal_heads[place] for place in places]",
        "[step.proximal_heads[place] for place in sorted(places)]",
        "tests/host/test_at_logits.py",
    ),
    "log-probs for the dump hold the graph": Mutation(
        "host/heads.py", "= values.detach()", "= values", "tests/host/test_at_logits.py"
    ),
    "supports of a rank are counted from the first": Mutation(
        "host/heads.py",
        "int(rows[i][1][stop]) - int(rows[i][1][start])",
        "int(rows[i][1][stop])",
        "tests/host/test_at_logits.py",
    ),
    "a recorded log-prob may be off in one direction": Mutation(
        "host/rollout_heads.py",
        "log_probs - response.recorded[:, None], 0).abs()",
        "log_probs - response.recorded[:, None], 0)",
        "tests/host/test_heads.py",
    ),
    "the surrogate's clip is not counted": Mutation(
        "core/correction.py",
        "clipped if by_surrogate is None else clipped | by_surrogate",
        "clipped",
        "tests/test_tis.py",
    ),
    "the trainer's head stands in for the proximal policy's": Mutation(
        "config/flat.py",
        "bool((mask & (target != tokens.proximal)).any())",
        "False",
        "tests/test_correct.py",
    ),
    "a third head that nobody reads": Mutation(
        "config/flat.py", "Head(*heads)", "Head(*heads[:2])", "tests/test_correct.py"
    ),
    "advantages with a gradient": Mutation(
        "core/losses.py", 'self._wide("advantages").detach()', 'self._wide("advantages")', "tests/test_tis.py"
    ),
    "tokens that do not count have a ratio of 1": Mutation(
        "core/metrics/totals.py",
        'histogram[around_0] += named["counted"] - sum(histogram)',
        "pass",
        "tests/core/metrics/test_statistics.py",
    ),
    "tokens that do not count have a tail": Mutation(
        "core/metrics/measure.py",
        "torch.where(outcome.finite, tail, 0)",
        "tail",
        "tests/core/test_centering.py",
    ),
    "probabilities near 1 in float32": Mutation(
        "ops/divergences.py", "log_probs.double().exp()", "log_probs.exp()", "tests/ops/test_equations.py"
    ),
    "a sampled token lies in the head": Mutation(
        "host/rollout_heads.py", 'if what == "support" and (', "if (", "tests/host/test_heads.py"
    ),
    "advantages of a prompt are not divided": Mutation(
        "tools/analysis/detectors/shared/estimators.py",
        "return plain, plain / deviation.clip(1e-9)",
        "return plain, plain",
        "tests/tools/analysis/detectors/test_estimators.py",
    ),
    "the last quarter begins late": Mutation(
        "tools/analysis/detectors/shared/along.py",
        "reached >= 0.75)",
        "reached >= 0.85)",
        "tests/tools/analysis/detectors/test_along.py",
    ),
    "a wrong line of a rehearsal is no failure": Mutation(
        "../slime_ext_cpu/rehearsal/main.py",
        "return FAILED if seen.status or any(line.state == checks.WRONG for line in lines) else 0",
        "return FAILED if seen.status else 0",
        "tests/cpu/test_rehearse.py",
    ),
}


@functools.cache
def fails(tests: str, mutation: Mutation | None = None) -> bool:
    """Whether tests fail on a copy, with the mutation if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("slime_ext", "slime_ext_cpu", "tests"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("docs", "configs", "examples", "benchmarks", "patches"):  # that tests read
            Path(folder, name).symlink_to(ROOT / name)
        Path(folder, "build").mkdir()
        Path(folder, "build/peers").symlink_to(ROOT / "build/peers")
        if mutation:
            path = Path(folder, "slime_ext", mutation.file)
            text = path.read_text()
            if (count := text.count(mutation.before)) != 1:
                raise CannotRun(f"{mutation.file}: expected {mutation.before!r} once, found {count}")
            path.write_text(text.replace(mutation.before, mutation.after))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
        if run.returncode > 1:  # pytest could not run them; below 0 a signal ended it, which is a notice, too
            raise CannotRun(run.stdout.decode()[-2000:])
        return run.returncode != 0


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in MUTATIONS]:
        print(f"{__doc__}\nexpected mutations, got {', '.join(unknown)}. There are:", *MUTATIONS, sep="\n  ")
        return 2
    survivors = []
    for name in names or MUTATIONS:
        mutation = MUTATIONS[name]
        try:
            if fails(mutation.tests):
                raise CannotRun(
                    f"{mutation.tests}: expected tests that pass without a mutation, got a failure"
                )
            state = "killed  " if fails(mutation.tests, mutation) else "SURVIVED"
        except CannotRun as error:  # the others are tried all the same
            print(error)
            state = "NOT RUN "
        print(f"{state}  {name}", flush=True)
        survivors += [] if state == "killed  " else [name]
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

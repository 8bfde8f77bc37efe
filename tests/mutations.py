"""Breaks the mathematics on purpose, one line at a time, and expects the tests to notice.

    python tests/mutations.py [NAME ...]

Each mutation replaces one piece of text in a copy of the package and runs the tests that should fail. Prints
one line per mutation and exits with 1 if any survives. Takes some minutes; not part of the test run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    file: str
    before: str
    after: str
    tests: str


SUITE = "tests/test_presets.py tests/test_correction.py"
CONTEXT_PARALLEL = "tests/host/test_context_parallel.py"
MUTATIONS = {
    "flip the ratio": Mutation(
        "correction.py", "finite, numerator - behavior)", "finite, behavior - numerator)", SUITE
    ),
    "flip the hook's ratio": Mutation(
        "tis.py",
        "(numerator - behavior).exp()",
        "(behavior - numerator).exp()",
        "tests/test_off_policy_is.py",
    ),
    "drop the mask": Mutation(
        "ops/ratios.py", "return mask & arrays.finite(behavior)", "return arrays.finite(behavior)", SUITE
    ),
    "multiply instead of select": Mutation(
        "ops/segments.py", "torch.where(self.mask, values, 0)", "values * self.mask", "tests/ops"
    ),
    "< for <=": Mutation(
        "coupled.py", "square() <= facts.plan", "square() < facts.plan", "tests/test_correction.py"
    ),
    "exclude the bound": Mutation(
        "tis.py", "(ratio >= low) & (ratio <= high)", "(ratio > low) & (ratio < high)", "tests/test_tis.py"
    ),
    "exclude the rejection bound": Mutation(
        "steps.py", "return value <= high", "return value < high", "tests/test_steps.py"
    ),
    "skip the all-reduce": Mutation(
        "ops/statistics.py",
        "if segments.all_sum is identity or",
        "if True or segments.all_sum is identity or",
        CONTEXT_PARALLEL,
    ),
    "forget the detach": Mutation(
        "ops/ratios.py",
        "return numerator.detach().to(dtype), behavior.detach()",
        "return numerator.to(dtype), behavior.detach()",
        "tests/test_presets.py tests/test_off_policy_is.py",
    ),
    "clamp at 20": Mutation(
        "steps.py",
        'facts.total(self.unit, self._aggregate, "ratio")',
        'facts.total(self.unit, self._aggregate, "ratio").clamp(-20, 20)',
        SUITE,
    ),
    "let a rejection shrink a later statistic": Mutation(
        "correction.py",
        "            state = step(state, facts)\n",
        "            state = step(state, facts)\n"
        "            fewer = replace(facts, log_ratio=facts.log_ratio * facts.kept(state))\n"
        "            facts = replace(facts, table=tabulate(self._needs, fewer.value_of, facts.segments))\n",
        "tests/test_laws.py",
    ),
    "mean over all tokens": Mutation(
        "facts.py",
        "as_bytes(self.segments.mask)",
        "as_bytes(self.segments.mask | True)",
        SUITE,
    ),
    "turns run on through sequences": Mutation(
        "ops/segments.py", ".index_fill_(0, host_ints(begins, self.device), False)", "", SUITE
    ),
    "the prefix includes the token": Mutation("ops/prefixes.py", "torch.inf).roll(1)", "torch.inf)", SUITE),
    "keep what is not finite": Mutation(
        "facts.py", "as_numbers(mask == self.finite, dtype)", "as_numbers(mask == mask, dtype)", SUITE
    ),
    "reject whatever the sign": Mutation(
        "steps.py", "return advantage < 0", "return advantage < torch.inf", SUITE
    ),
    "inward for outward": Mutation("steps.py", '"sum", "ratio") > 0', '"sum", "ratio") < 0', SUITE),
    "k3 of the other direction": Mutation(
        "ops/divergences.py",
        "torch.expm1(log_ratio) - log_ratio",
        "torch.expm1(-log_ratio) + log_ratio",
        "tests/ops",
    ),
    "drop the mask in the loops": Mutation(
        "kernels/loops.cpp", "t.finite = t.mask &", "t.finite =", "tests/kernels/test_loops.py"
    ),
    "drop the mask in Triton": Mutation(
        "kernels/triton_text.py", "finite = mask & (", "finite = here & (", "tests/kernels/test_triton.py"
    ),
    "let passes forget an act": Mutation(
        "kernels/writer.py", "str(yes), str(no)", "str(no), str(no)", "tests/kernels/test_loops.py"
    ),
    "passes exclude the bound": Mutation(
        "kernels/writer.py", "<= {limit}", "< {limit}", "tests/kernels/test_loops.py"
    ),
    "a chunk lies in two bins of position": Mutation(
        "kernels/chunks.py",
        "runs(segments, POSITIONS)",
        "runs(segments, POSITIONS[1:])",
        "tests/kernels/test_chunks.py",
    ),
    "a shared block counts whole and token by token": Mutation(
        "ops/grid.py", "table.index_fill_(1, self.index[0], 0)", "pass", "tests/ops"
    ),
    "a device's sums begin where the next segment does": Mutation(
        "ops/grid.py", "self.numbers.cumsum() - self.numbers", "self.numbers.cumsum()", "tests/ops"
    ),
    "what is sent later takes the place of what is there": Mutation(
        "ops/uploads.py",
        "if name not in self._there and name not in self._waiting",
        "if name not in self._waiting",
        "tests/ops/test_uploads.py",
    ),
    "a device counts tokens without a log-prob among its extremes": Mutation(
        "metrics/columns_on_device.py",
        "masked_fill_(lost, -math.inf)",
        "masked_fill_(lost, 0)",
        "tests/metrics/test_statistics.py",
    ),
    "blocks pass the end of a segment": Mutation(
        "ops/arrays.py",
        "np.repeat(starts, many) + long * inside",
        "long * np.arange(many.sum())",
        "tests/ops",
    ),
    "a part of a sequence forgets the minima before it": Mutation(
        "ops/prefixes.py", "lowest.roll(1, 1)", "lowest", "tests/host/test_context_parallel.py"
    ),
    "touch the loss without --use-tis": Mutation(
        "host/hook.py", 'getattr(call.args, "use_tis", False) and', "", "tests/test_tis.py"
    ),
    "divide by a sample's own kept tokens": Mutation(
        "host/siblings.py",
        "kept[row.step, row.rollout] += row.kept",
        "kept[row.step, row.rollout] = row.kept",
        "tests/host/test_step_plan.py",
    ),
    "an atomic group keeps its tokens in the denominator": Mutation(
        "host/settle.py",
        "rows = groups.without(rows, broken)",
        "pass",
        "tests/host/test_step_plan.py",
    ),
    "count a recomputed loss twice": Mutation(
        "host/step_metrics.py", "self.seen[id(mask)] = mask", "pass", "tests/host/test_train_step.py"
    ),
    "count shared sequences on every rank": Mutation(
        "metrics/measure.py",
        "if not first or not count.numel()",
        "if not count.numel()",
        "tests/metrics/test_statistics.py",
    ),
    "a curve's bin begins one later": Mutation(
        "ops/runs.py",
        "lows = np.array((0, *edges), dtype=np.int64)",
        "lows = np.array((0, *(1 + edge for edge in edges)), dtype=np.int64)",
        "tests/metrics/test_statistics.py",
    ),
    "a step's rejections depend on the others": Mutation(
        "metrics/layout.py",
        'rejected_fraction", 1 << number',
        'rejected_fraction", gone',
        "tests/metrics/test_statistics.py",
    ),
    "the smallest is the largest": Mutation(
        "metrics/names.py",
        '_extreme("log_ratio_min", -1)',
        '_extreme("log_ratio_max", 1)',
        "tests/metrics/test_statistics.py",
    ),
    "a guard counts steps that are not in a row": Mutation(
        "guards.py", "self.outside.pop(name, None)", "pass", "tests/test_rails.py"
    ),
    "metrics only goes on correcting": Mutation(
        "host/hook.py",
        " and not step_metrics.leaves_loss_alone()",
        "",
        "tests/host/test_train_step.py",
    ),
    "an age counts from the newest weights": Mutation(
        "host/ages.py", "now - min(", "now - max(", "tests/host/test_ages.py"
    ),
    "the last non-finite log-prob is named": Mutation(
        "host/poison.py",
        "in self.looks.items()",
        "in reversed(self.looks.items())",
        "tests/host/test_train_step.py",
    ),
    "sum a micro-batch for a step": Mutation(
        "coupled.py", "for state, facts in seen)).unbind()", "for state, facts in seen[:1])).unbind()", SUITE
    ),
    "write bits as floats on a device": Mutation(
        "outcome.py", 'one.device.type != "cpu"', "False", "tests/kernels/test_on_a_device.py"
    ),
    "compile for every alignment": Mutation(
        "kernels/machine_code.py",
        "do_not_specialize=plain",
        "do_not_specialize=[]",
        "tests/kernels/test_build.py",
    ),
    "spill registers": Mutation(
        "kernels/machine_code.py", "lanes // PER_WARP", "1", "tests/kernels/test_build.py"
    ),
    "read between gaps": Mutation(
        "kernels/triton.py", "value.detach().contiguous()", "value.detach()", "tests/kernels/test_triton.py"
    ),
    "chunks over the end": Mutation(
        "kernels/chunks.py",
        "np.minimum(stops.repeat(many) - begins, lanes)",
        "lanes + 0 * begins",
        "tests/kernels/test_chunks.py",
    ),
    "positions of a piece from 0 on": Mutation(
        "ops/runs.py", "lengths -= _before(starts, edges)", "pass", "tests/kernels/test_chunks.py"
    ),
    "a loss of any length": Mutation(
        "host/packing.py", "pg_loss.numel() != segments.size", "False", "tests/test_tis.py"
    ),
    "padding unknown": Mutation(
        "host/packing.py", "(padded_length or total_length)", "total_length", "tests/host/test_packing.py"
    ),
    "ratios without a limit": Mutation(
        "ops/surrogates.py", "log_ratio.clamp(max=most)", "log_ratio", "tests/test_correction.py"
    ),
    "a surrogate of rejected tokens": Mutation(
        "correction.py", "vars(tokens), outcome.keep", "vars(tokens), outcome.finite", SUITE
    ),
    "factors without a limit": Mutation(
        "correction.py", "else factor.clamp(max=largest_factor(dtype))", "else factor", SUITE
    ),
    "weights of another sequence": Mutation(
        "kernels/measures.h",
        "if (CURVES && (SHARED || aged)) flush();",
        "if (CURVES && aged) flush();",
        "tests/kernels/test_loops.py",
    ),
    "a piece begins with a vector": Mutation(
        "kernels/loops.cpp",
        "CURVES && pieces.start(piece) % LANES)",
        "CURVES && false)",
        "tests/kernels/test_loops.py",
    ),
    "versions digit by digit": Mutation(
        "host/versions.py", " and not isinstance(value, str)", "", "tests/host/test_rollout_log.py"
    ),
    "ages of weights to come": Mutation(
        "host/ages.py", ' if age >= 0 else float("nan")', "", "tests/host/test_ages.py"
    ),
    "a stage that keeps its reason": Mutation(
        "host/step_metrics.py",
        "if not any(over_stages([int(bool(reason))])):",
        "if True:",
        "tests/host/test_metrics_layouts.py",
    ),
    "no word of the floor": Mutation(
        "dialects/verl_head.py", "(FLOOR, *", "(*", "tests/dialects/test_denominator.py"
    ),
    "a gradient through the ratio of cispo": Mutation(
        "ops/surrogates.py", "log_ratio.detach().exp()", "log_ratio.exp()", "tests/ops"
    ),
    "select by a product of numbers": Mutation(
        "ops/arrays.py",
        'bits = f"i{values.itemsize}"',
        'bits = f"f{values.itemsize}"',
        "tests/ops/test_arrays.py",
    ),
    "numpy weights rejected sequences": Mutation(
        "kernels/vectors.py",
        "np.where(kept, weights, 0)",
        "weights",
        "tests/kernels/test_vectors.py",
    ),
    "numpy keeps what single tokens lost": Mutation(
        "kernels/vectors.py",
        "held if together and looked.whole else keep & held",
        "held",
        "tests/kernels/test_vectors.py",
    ),
    "numpy shares what single tokens do not": Mutation(
        "kernels/vectors.py",
        "own if exact or (together and by.sound) else None",
        "own",
        "tests/metrics/test_statistics.py",
    ),
    "numpy takes any sequence for sound": Mutation(
        "kernels/vector_text.py",
        'any(step.unit == "sequence" for step in correction.steps)',
        "True",
        "tests/metrics/test_statistics.py",
    ),
    "numpy takes 0 for the ratio of what is not finite": Mutation(
        "kernels/vectors.py",
        "else lambda: looked.ratio_or_one",
        "else lambda: looked.ratio",
        "tests/kernels/test_vectors.py",
    ),
    "numpy forgets the group": Mutation(
        "kernels/vectors.py",
        'if "groups" in settled:',
        "if False:",
        "tests/kernels/test_vectors.py",
    ),
    "numpy counts masked tokens": Mutation(
        "kernels/vectors.py",
        "every if looked.whole else every & looked.mask",
        "every",
        "tests/metrics/test_statistics.py",
    ),
    "numpy counts shared sequences on every rank": Mutation(
        "metrics/measure_on_cpu.py",
        "if not first or not len(there):",
        "if not len(there):",
        "tests/metrics/test_statistics.py",
    ),
    "numpy counts sequences without tokens": Mutation(
        "metrics/measure_on_cpu.py",
        "there = seen.count > 0",
        "there = seen.count >= 0",
        "tests/metrics/test_statistics.py",
    ),
    "a masked token is an extreme": Mutation(
        "metrics/measure_on_cpu.py",
        "high > 0 > low or (whole and high >= low)",
        "high >= low",
        "tests/kernels/test_vectors.py",
    ),
    "what is joined with nothing is lost": Mutation(
        "kernels/vector_text.py",
        "value = value.removeprefix(name + join)",
        "value = name",
        "tests/kernels/test_vectors.py",
    ),
}


def killed(mutation: Mutation) -> bool:
    """Whether the tests fail on a copy with the mutation."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("slime_ext", "tests"):
            shutil.copytree(
                ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__", "launcher")
            )
        path = Path(folder, "slime_ext", mutation.file)
        text = path.read_text()
        if text.count(mutation.before) != 1:
            raise SystemExit(
                f"{mutation.file}: expected {mutation.before!r} once, found {text.count(mutation.before)}"
            )
        path.write_text(text.replace(mutation.before, mutation.after))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *mutation.tests.split(),
        ]
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
        if run.returncode not in (0, 1):
            raise SystemExit(run.stdout.decode()[-2000:])
        return run.returncode == 1


def main(names: list[str]) -> int:
    survivors = []
    for name in names or MUTATIONS:
        dead = killed(MUTATIONS[name])
        print(f"{'killed  ' if dead else 'SURVIVED'}  {name}", flush=True)
        survivors += [] if dead else [name]
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

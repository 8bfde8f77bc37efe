"""Writes benchmarks/fidelity/RESULTS.md: computed numbers, and sentences that follow from them by rule.

python -m benchmarks.fidelity --results"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import torch

from benchmarks.fidelity import exact, markov
from benchmarks.fidelity.exact import Fidelity, World, centerings
from benchmarks.fidelity.markov import Chain, Sampled
from slime_ext import presets
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Reinforce
from slime_ext.core.needs import Need
from slime_ext.core.steps import Reweight

NONE, TOKEN = "metrics_only", "token_tis"
NAMES = (
    *(NONE, TOKEN, "icepop", "sao_math", "sao_code", "kpop", "dppo_tv", "ipo", "topr", "min_prefix"),
    *("fireworks_geometric", "seq_is", "geo_rs", "decoupled_k3_rs", "trm", "seq_mask_tis", "flash_reinforce"),
    *("opsm", "cppo", "ctpo", "m2", "p3o", "delightful"),
)
PRODUCT = "product of ratios"
SEEDS = range(60)  # random worlds of the short laboratory
SURE = 0.05  # p of the sign test below which two methods are told apart
SAME = 1e-9  # relative difference below which two methods are one estimator
LEAST_KEPT, MOST_KEPT = (
    0.05,
    0.9,
)  # below the first, hardly any token is kept; above the second, nearly all are
FEW = 50  # with fewer effective responses, neither a mean nor its error can be trusted


@dataclass(frozen=True)
class Row:
    """Everything computed for one method."""

    correction: Correction
    exact: Mapping[str, Sequence[Fidelity]]  # mismatch of ``exact`` -> one entry for each seed
    sampled: Mapping[tuple[str, int], Sampled]  # by mismatch and length of ``markov``

    def biases(self, world: str) -> list[float]:
        """Returns the bias over the norm of the true gradient, for each seed."""
        return [f.bias / f.true for f in self.exact[world]]


def methods(vocabulary: int) -> dict[str, Correction]:
    """Returns the compared corrections by name; score centering over one token, two, and all tokens."""
    plain = Correction("target", Reinforce(), (Reweight("sequence"),))
    named = {name: presets.get(name) for name in NAMES}
    return named | {PRODUCT: plain} | centerings((1, 2, vocabulary), vocabulary)


def drawn(seeds: Sequence[int] = SEEDS) -> dict[str, list[World]]:
    """Draws the worlds of the short laboratory, one for each mismatch and seed."""
    return {
        name: [World.of(name, seed) for seed in seeds] for name in exact.MISMATCHES if name != "on-policy"
    }


def results(
    lengths: Mapping[int, int] | None = None,
    seed: int = 0,
    under_way: Callable[[list], Iterable] = iter,
    seeds: Sequence[int] = SEEDS,
) -> str:
    """Returns RESULTS.md.

    Args:
        lengths: tokens of a response -> number of responses; by default those of ``markov``.
        seed: seed of the long laboratory's policies and responses.
        under_way: wraps the list of methods to show progress.
        seeds: seeds of the short laboratory's worlds.
    """
    lengths = lengths or markov.LENGTHS
    short, long = methods(exact.VOCABULARY), methods(markov.VOCABULARY)
    worlds = drawn(seeds)
    chains = {
        (mismatch, length): Chain.of(spread, length, responses, seed)
        for (mismatch, spread), (length, responses) in product(markov.MISMATCHES.items(), lengths.items())
    }
    rows = {
        name: Row(
            short[name],
            {world: _exact(short[name], of_world) for world, of_world in worlds.items()},
            {key: markov.evaluate(of_chain, chain) for key, chain in chains.items()},
        )
        for name, of_chain in under_way(list(zip(short, long.values(), strict=True)))
    }
    parts = [
        INTRODUCTION.format(lengths=_listed(lengths), seeds=len(seeds), seed=seed),
        _distances(worlds, chains),
        _exact_table(rows),
        _compared(rows, worlds),
        _centering_table(seeds),
        *(_sampled_table(rows, mismatch, lengths) for mismatch in markov.MISMATCHES),
        _products(chains),
        IN_RUNS,
    ]
    return "\n".join(parts)


def short_rows(
    worlds: Mapping[str, Sequence[World]], under_way: Callable[[list], Iterable] = iter
) -> dict[str, Row]:
    """Evaluates the figures' methods in the short laboratory: those that need no pairs of samples."""
    chosen = {
        name: correction
        for name, correction in methods(exact.VOCABULARY).items()
        if Need.WHOLE_STEP not in correction.needs and not _is_centering(name)
    }
    return {
        name: Row(
            chosen[name], {world: _exact(chosen[name], of_world) for world, of_world in worlds.items()}, {}
        )
        for name in under_way(list(chosen))
    }


INTRODUCTION = """# Bias and variance of every correction

This page has the numbers behind [docs/what_each_method_does.md](../../docs/what_each_method_does.md). The
command below prints it. Its last section names the command of the table there.

    python -m benchmarks.fidelity --results > benchmarks/fidelity/RESULTS.md

The policies are small enough to know the true gradient. There are two laboratories:

- The *short* one has 3 tokens and 4 steps. Each of the 81 responses has a random advantage. We sum over all 81
  responses, so the numbers of a world have no error. A world is one random draw, and another draw has other
  numbers. We draw {seeds} worlds, and a cell has the mean over them, with the smallest and the largest value.
- The *long* one is a Markov policy over 8 tokens, with responses of {lengths} tokens whose reward is a sum over
  tokens. It is drawn once (seed {seed}). Its true gradient is exact. The mean of a method is sampled, with control
  variates, and printed with its standard error.

| column | what it is |
|---|---|
| bias | norm of the estimate's mean minus the true gradient, over the norm of the true gradient: 0 is unbiased, 1 is as wrong as no gradient |
| cosine | between the estimate's mean and the true gradient |
| variance | of the estimate from one response; in the long laboratory over the squared norm of the true gradient |
| kept | share of the tokens that are not rejected |

`metrics_only` corrects nothing. The formulas of the others: [corrections.md](../../docs/corrections.md).

This is no language model and no training run. Bounds that were made for thousands of tokens and a large vocabulary
act differently on 8 tokens. The long chain forgets its past within a few tokens, and its reward is a sum. So token
weights lose little there although they leave out the prefix. In the short laboratory, their bias comes from that.
Some methods (`delightful`, every trust region) do not aim at the gradient of this reward, so a large bias does not
make them worse.
"""  # noqa: E501

IN_RUNS = """
## In runs

Does a bias show in a run? We wrote each sentence down before we ran its eight seeds (settings: commit ea9842a). The
runs use plain torch without this package: 60 steps of SGD on 64 responses, from a sampler that is stale all the
time. Eight other seeds had been run before (`--pilot`), with the same answers. The gain is the growth of the exact
expected reward.

    python -m benchmarks.evidence.sentences

| sentence | gain of each | difference ± error | seeds for it | answer |
|---|---|---:|---:|---|
| Token weights capped at 2 learn more than none, at 1,024 tokens | token 23.699, none 24.222 | -0.524 ± 0.368 | 3 of 8 | does not hold |
| Sequence weights capped at 2 learn less than none, at 1,024 tokens | none 24.222, sequence 0.572 | +23.651 ± 7.787 | 8 of 8 | holds |
| With a baseline that is off by 1, centering learns more than none | centered 5.724, none 4.933 | +0.791 ± 1.180 | 3 of 8 | does not hold |
| Beside token weights capped at 2 centering adds nothing | token, centered 5.683, token 5.683 | +0.000 ± 0.000 | - | says nothing: no ratio reached 2 (largest 1.56), so both are one estimator |

A bias of 0.24 whose direction is right (cosine 0.98) did no harm that eight seeds can show. Sequence weights lost
nearly all of the gain: at 1,024 tokens almost all of them are below 1, and with SGD the steps shrink with them. The
tables say what a method does to the gradient. They do not say whether a run is worse for it.
"""  # noqa: E501


def _exact(correction: Correction, worlds: Sequence[World]) -> list[Fidelity]:
    """Evaluates a correction in each world; in the first world only if it couples samples.

    A method that couples samples takes seconds for each world.
    """
    if Need.WHOLE_STEP in correction.needs:
        return [exact.evaluate(correction, worlds[0], batch=2)]
    return [exact.evaluate(correction, world) for world in worlds]


def _is_centering(name: str) -> bool:
    return name.startswith(("reinforce, ", "centered, "))


def _code(name: str) -> str:
    return f"`{name}`" if name in presets.PRESETS else name


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], column: str = "---:") -> str:
    rule = f"|---{f'|{column}' * (len(columns) - 1)}|"
    head = [f"\n## {title}\n", f"| {' | '.join(columns)} |", rule]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _number(value: float, digits: int = 2) -> str:
    return "0" if abs(value) < 0.5 * 10**-digits else f"{value:.{digits}f}"


def _slashed(words: Iterable[str]) -> str:
    return " / ".join(words)


def _ranged(values: Sequence[float]) -> str:
    """Returns the mean, and the smallest and the largest of several values."""
    span = f" ({_number(min(values))} to {_number(max(values))})" if len(values) > 1 else ""
    return f"{_number(fmean(values))}{span}"


def _distances(worlds: Mapping[str, Sequence[World]], chains: Mapping[tuple[str, int], Chain]) -> str:
    """Returns a table of k3 and the largest ratio in the worlds of both laboratories."""
    cells = []
    for name, drawn in worlds.items():
        off, drift = exact.MISMATCHES[name]
        k3 = [world.k3 for world in drawn]
        cells.append(
            [
                f"short, {name}",
                f"{off:g}" + (f", target {drift:g}" if drift else ""),
                f"{fmean(k3):.2g} ({min(k3):.2g} to {max(k3):.2g})",
                f"{max(float(world.ratios.max()) for world in drawn):.3g}",
            ]
        )
    longest = max(length for _, length in chains)
    for (name, length), chain in chains.items():
        if length == longest:
            off = f"{markov.MISMATCHES[name]:g}"
            cells.append([f"long, {name}", off, f"{chain.k3:.2g}", f"{float(chain.ratios.max()):.3g}"])
    text = """
"Off" is the standard deviation of the noise of the sampler's logits. k3 is in nats per token: the mean over
the worlds, with the smallest and the largest value. If the largest ratio is below 2, a cap of 2 never acts,
so a method that differs from `token_tis` only in its bounds is equal to it.
"""
    return _table("How far apart the policies are", ["world", "off", "k3", "largest ratio"], cells) + text


def _exact_table(rows: Mapping[str, Row]) -> str:
    worlds = list(rows[NONE].exact)
    cells = [
        [
            _code(name),
            *(
                _slashed(
                    [
                        _ranged(row.biases(world)),
                        _number(fmean(f.cosine for f in row.exact[world])),
                        _number(fmean(f.variance for f in row.exact[world])),
                        _number(fmean(f.kept for f in row.exact[world])),
                    ]
                )
                for world in worlds
            ),
        ]
        for name, row in rows.items()
        if not _is_centering(name)
    ]
    title = "Four steps, nothing sampled"
    text = "\n`m2` and `p3o` couple samples, so they are evaluated on pairs of responses, in one world.\n"
    return _table(title, ["bias / cosine / variance / kept", *worlds], cells) + text


def sign_test(wins: int, losses: int) -> float:
    """Returns the two-sided p of a split at least as uneven, by chance.

    >>> sign_test(8, 0), round(sign_test(23, 37), 3), sign_test(0, 0)
    (0.0078125, 0.092, 1.0)
    """
    n, most = wins + losses, max(wins, losses)
    tail = sum(math.comb(n, k) for k in range(most, n + 1)) / 2**n
    return min(1.0, 2 * tail)


def against(name: str, row: Row, base: Row, world: str) -> str:
    """Compares a method's bias with that of another method, ``name``, over the worlds."""
    pairs = list(zip(row.biases(world), base.biases(world), strict=False))
    if _is_same(row.exact[world], base.exact[world]):
        return f"the same estimator as {_code(name)}"
    ties = SAME * max(max(pair) for pair in pairs)
    wins, losses = (sum(sign * (other - mine) > ties for mine, other in pairs) for sign in (1, -1))
    if len(pairs) == 1:
        return f"{'smaller' if wins else 'larger'} than {_code(name)} in one world"
    side, count = ("smaller", wins) if wins >= losses else ("larger", losses)
    if sign_test(wins, losses) >= SURE:
        return f"not told apart from {_code(name)} (smaller on {wins} of {len(pairs)})"
    return f"{side} than {_code(name)} on {count} of {len(pairs)}"


def _said(row: Row, others: Mapping[str, Row], world: str) -> str:
    """Describes a method in a world: its bias beside others, and how much it keeps."""
    kept = fmean(f.kept for f in row.exact[world])
    if kept < LEAST_KEPT:
        return f"keeps {kept:.1%} of the tokens: hardly a gradient"
    said = [against(name, row, other, world) for name, other in others.items()]
    return "; ".join([*said, *([f"keeps {kept:.0%}"] if kept < MOST_KEPT else [])])


def _is_same(ones: Sequence[Fidelity], others: Sequence[Fidelity]) -> bool:
    """Whether two methods have the same mean gradient in every world. False if one keeps no token."""
    pairs = list(zip(ones, others, strict=False))
    return all(
        torch.allclose(one.mean, other.mean, rtol=0, atol=SAME * one.true) and one.kept > 0
        for one, other in pairs
    )


def _compared(rows: Mapping[str, Row], worlds: Mapping[str, Sequence[World]]) -> str:
    """Compares each method's bias with two others by a sign test over worlds.

    The others are no correction and token weights.
    """
    shown = [name for name in ("stale", "far") if name in worlds]
    cells = [
        [
            _code(name),
            *(
                _said(row, {other: rows[other] for other in (NONE, TOKEN) if other != name}, world)
                for world in shown
            ),
        ]
        for name, row in rows.items()
        if name != NONE and not _is_centering(name)
    ]
    text = f"""
Two methods are told apart if the sign test over the worlds has p below {SURE}, two-sided. A smaller bias
does not make a better run: variance, the tokens kept and the step size count as well (last section).
"""
    return _table("What follows: the bias", ["method", *shown], cells, column="---") + text


def _centering_table(seeds: Sequence[int]) -> str:
    """Tabulates score centering's exact bias.

    The baseline is right, or off by 1.
    """
    worlds = {
        f"{name}{', baseline off by 1' if offset else ''}": [World.of(name, one, offset) for one in seeds]
        for name in ("stale", "stale + drift", "far")
        for offset in (0.0, 1.0)
    }
    cells = []
    for name, correction in centerings((1, 2, exact.VOCABULARY)).items():
        by_world = [_exact(correction, drawn) for drawn in worlds.values()]
        cells.append(
            [
                name,
                *(
                    f"{_ranged([f.bias / f.true for f in each])} / {_number(fmean(f.variance for f in each))}"
                    for each in by_world
                ),
            ]
        )
    text = """
If the score is centered over all tokens, a constant that is added to every advantage does not change the
mean, so centering removes the effect of a wrong baseline. A token weight rho without a bound does the same
without a head, because the sampler's mean of rho times the score is the trainer's mean of the score, which
is 0. So centering acts only if f is 1 or a bound acts.
"""
    title = "Score centering, four steps, nothing sampled"
    return _table(title, ["bias / variance", *worlds], cells) + text


def _sampled_table(rows: Mapping[str, Row], mismatch: str, lengths: Mapping[int, int]) -> str:
    """Returns a row for each estimator. Methods with the same numbers at every length share a row."""
    groups: dict[tuple, list[str]] = {}
    for name, row in rows.items():
        samples = [row.sampled[mismatch, length] for length in lengths]
        key = tuple(float(f"{x:.9g}") for s in samples for x in (s.bias, s.cosine, s.variance, s.kept))
        groups.setdefault(key, []).append(name)
    cells = []
    for names in groups.values():
        said = []
        for length, responses in lengths.items():
            s = rows[names[0]].sampled[mismatch, length]
            few = f", carried by {s.ess * responses:.0f}" if s.ess * responses < FEW else ""
            said.append(
                f"{_number(s.bias)} ± {_number(s.error)}{few} / "
                + _slashed((_number(s.cosine), _number(s.variance, 1), _number(s.kept)))
            )
        cells.append([", ".join(map(_code, names)), *said])
    columns = ["bias ± error / cosine / variance / kept", *(f"{length:,}" for length in lengths)]
    text = f"""
Methods in one row are the same estimator in this world. "Carried by" is the effective number of responses,
shown if it is below {FEW}. Do not trust such a mean or its error.
"""
    return _table(f"Markov policy, {mismatch}, by response length", columns, cells) + text


def _products(chains: Mapping[tuple[str, int], Chain]) -> str:
    sizes = [f"{chain.ess_of_products:.2g} ({mismatch}, {n:,})" for (mismatch, n), chain in chains.items()]
    return (
        "\nEffective sample size of the uncapped product of ratios, exact, as a share of the responses: "
        f"{', '.join(sizes)}. The product is unbiased at every length. If the effective sample is only a few "
        "responses, a sampled mean can look biased, and its standard error is too small.\n"
    )


def _listed(lengths: Iterable[int]) -> str:
    words = [f"{n:,}" for n in lengths]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

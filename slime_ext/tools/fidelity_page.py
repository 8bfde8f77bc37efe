"""``slime-ext bench fidelity --page``: docs/what_each_method_does.md, every number computed, and the
sentences that follow from them by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slime_ext import presets
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Reinforce
from slime_ext.core.steps import Reweight
from slime_ext.tools import fidelity, long_fidelity
from slime_ext.tools.fidelity import Fidelity, World, centerings
from slime_ext.tools.long_fidelity import Chain, Sampled

NONE = "metrics_only"
NAMES = (
    *(NONE, "token_tis", "icepop", "sao_math", "sao_code", "kpop", "dppo_tv", "ipo", "topr", "min_prefix"),
    *("fireworks_geometric", "seq_is", "geo_rs", "decoupled_k3_rs", "trm", "seq_mask_tis", "flash_reinforce"),
    *("opsm", "cppo", "ctpo", "m2", "p3o", "delightful"),
)
PRODUCT = "product of ratios"
CLEAR = 0.1  # relative: a smaller change is called none
FEW = 50  # responses that carry a mean; of fewer neither it nor its standard error can be trusted


@dataclass(frozen=True)
class Row:
    """What is known of one method."""

    correction: Correction
    exact: Mapping[str, Fidelity]  # by mismatch of ``fidelity``
    sampled: Mapping[tuple[str, int], Sampled]  # by mismatch and length of ``long_fidelity``


def methods(vocabulary: int) -> dict[str, Correction]:
    """The page's methods; score centering over one token, two, and the whole vocabulary."""
    plain = Correction("target", Reinforce(), (Reweight("sequence"),))
    named = {name: presets.get(name) for name in NAMES}
    return named | {PRODUCT: plain} | centerings((1, 2, vocabulary), vocabulary)


def page(
    lengths: Mapping[int, int] | None = None, seed: int = 0, under_way: Callable[[list], Iterable] = iter
) -> str:
    """The whole page as Markdown.

    Args:
        lengths: tokens of a response -> responses; those of ``long_fidelity`` by default.
        seed: of both laboratories' policies and responses.
        under_way: shows how far it is.
    """
    lengths = lengths or long_fidelity.LENGTHS
    short, long = methods(fidelity.VOCABULARY), methods(long_fidelity.VOCABULARY)
    worlds = {name: World.of(name, seed) for name in fidelity.MISMATCHES if name != "on-policy"}
    chains = {
        (mismatch, length): Chain.of(spread, length, responses, seed)
        for mismatch, spread in long_fidelity.MISMATCHES.items()
        for length, responses in lengths.items()
    }
    rows = {
        name: Row(
            short[name],
            {world: _exact(short[name], worlds[world]) for world in worlds},
            {key: long_fidelity.evaluate(of_chain, chain) for key, chain in chains.items()},
        )
        for name, of_chain in under_way(list(zip(short, long.values(), strict=True)))
    }
    longest = max(lengths)
    parts = [
        INTRODUCTION.format(lengths=_listed(lengths), longest=longest, seed=seed),
        _exact_table(rows),
        _centering_table(seed),
        *(_sampled_table(rows, mismatch, lengths) for mismatch in long_fidelity.MISMATCHES),
        _products(chains),
        _sentences(rows, longest, lengths[longest]),
        IN_RUNS,
    ]
    return "\n".join(parts)


INTRODUCTION = """# What each method does, exactly

Bias, variance and direction of the gradient that a method makes of off-policy samples, on policies small
enough to know the true one. This page is the output of one command (seed {seed}); the last section holds the
output of another:

    slime-ext bench fidelity --page > docs/what_each_method_does.md

There are two laboratories. The *short* one has 3 tokens, 4 steps, and advantages that are any number for
each of the 81 responses: they are all added up, so there is no error. The *long* one is a Markov policy
over 8 tokens with responses of {lengths} tokens, whose reward is a sum over tokens. Its true gradient
is exact; a method's mean is sampled with control variates and printed with its standard error. The
sampler's logits are off by 0.05 (mismatch); stale is 0.4 in the short laboratory and 0.15 in the long one;
with drift the target has moved by 0.2 too.

Bias is relative to the norm of the true gradient: 0 is unbiased, 1 as far off as no gradient at all. Cosine
is with the true gradient. Variance is of one response's estimate, in the long laboratory relative to the
squared norm of the true gradient. Kept is the part of the tokens that stays. `metrics_only` corrects
nothing; the formulas of the others: [corrections.md](corrections.md).

What this is not: a language model, or a run. Bounds made for thousands of tokens and a large vocabulary act
differently on 8 tokens. The long chain forgets its past within a few tokens and its reward is a sum, so
what token weights leave out, the prefix, costs little there. In the short one, the bias that they leave is
its price. A method with another aim than the gradient of this reward (`delightful`, every trust region) is
not worse for missing it. Read the direction of an effect and how it grows with length, not its size.
"""

# The table is what the command in it prints, seeds 0 to 7; it takes 15 seconds of one core.
IN_RUNS = """
## In runs

Do the long laboratory's sentences decide a run? Each was said before its eight seeds were run (settings: commit
ea9842a), in plain torch without this package: 60 steps of SGD on 64 responses, from a sampler that is stale
throughout. Eight other seeds had been looked at before (`--pilot`), with the same answers. The gain is of the exact
expected reward.

    python -m benchmarks.evidence.sentences

| sentence | gain of each | difference ± error | seeds for it | answer |
|---|---|---:|---:|---|
| Token weights capped at 2 learn more than none, at 1,024 tokens | token 23.699, none 24.222 | -0.524 ± 0.368 | 3 of 8 | does not hold |
| Sequence weights capped at 2 learn less than none, at 1,024 tokens | none 24.222, sequence 0.572 | +23.651 ± 7.787 | 8 of 8 | holds |
| With a baseline that is off by 1, centering learns more than none | centered 5.724, none 4.933 | +0.791 ± 1.180 | 3 of 8 | does not hold |
| Beside token weights capped at 2 it adds nothing | token, centered 5.683, token 5.683 | +0.000 ± 0.000 | - | holds |

A bias of 0.24 whose direction is right (cosine 0.98) costs such a run nothing that eight seeds show, so taking it
away buys nothing either. Losing the gradient costs everything: sequence weights are nearly all below 1 at 1,024
tokens, and with SGD the steps shrink with them. The tables say what a method does to the gradient; whether a run
notices is another question.
"""  # noqa: E501


def _exact(correction: Correction, world: World) -> Fidelity:
    return fidelity.evaluate(correction, world, batch=2 if correction.is_coupled else 1)


def _is_centering(name: str) -> bool:
    return name.startswith(("reinforce, ", "centered, "))


def _code(name: str) -> str:
    return f"`{name}`" if name in presets.PRESETS else name


def _cost(correction: Correction) -> str:
    """What a method needs beside one pass over the tokens."""
    units = {step.unit for step in correction.steps} - {"token"}
    found = {
        "the sampler's head": correction.center is not None,
        "the whole step first": correction.needs_plan,
        "one sum over ranks": bool(units or correction.statistics),
        "target log-probs": correction.needs_target,
    }
    return ", ".join(name for name, is_there in found.items() if is_there) or "nothing"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [f"\n## {title}\n", f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _number(value: float, digits: int = 2) -> str:
    return "0" if abs(value) < 0.5 * 10**-digits else f"{value:.{digits}f}"


def _slashed(words: Iterable[str]) -> str:
    return " / ".join(words)


def _exact_table(rows: Mapping[str, Row]) -> str:
    names = [name for name in rows if not _is_centering(name)]
    worlds = list(rows[NONE].exact)
    columns = ["bias / cosine / variance / kept", *worlds]
    cells = [
        [
            _code(name),
            *(
                _slashed(_number(x) for x in (f.bias / f.true, f.cosine, f.variance, f.kept))
                for f in rows[name].exact.values()
            ),
        ]
        for name in names
    ]
    return _table("Four steps, nothing sampled", columns, cells)


def _centering_table(seed: int) -> str:
    """Bias of score centering, exact, with advantages as they are and with a baseline that is off by 1."""
    worlds = {
        f"{name}{', baseline off by 1' if offset else ''}": World.of(name, seed, offset)
        for name in ("mismatch", "stale", "stale + drift")
        for offset in (0.0, 1.0)
    }
    cells = []
    for name, correction in centerings((1, 2, fidelity.VOCABULARY)).items():
        found = [_exact(correction, world) for world in worlds.values()]
        cells.append([name, *(f"{_number(f.bias / f.true, 3)} / {_number(f.variance)}" for f in found)])
    text = """
The paper's statement holds exactly: over all tokens a constant advantage moves nothing in the mean, so what
centering takes away is what a baseline that is off puts in. A token weight rho that no bound cuts does the
same without a head: the sampler's mean of rho times the score is the trainer's mean of the score, which is
0. There centering adds nothing; it acts where f is 1, or where a bound acts.
"""
    title = "Score centering, four steps, nothing sampled"
    return _table(title, ["bias / variance", *worlds], cells) + text


def _sampled_table(rows: Mapping[str, Row], mismatch: str, lengths: Mapping[int, int]) -> str:
    columns = ["bias ± error / cosine / variance / kept", *(f"{length:,}" for length in lengths)]
    cells = []
    for name, row in rows.items():
        found = [row.sampled[mismatch, length] for length in lengths]
        cells.append(
            [
                _code(name),
                *(
                    f"{_number(s.bias)} ± {_number(s.error)} / "
                    + _slashed((_number(s.cosine), _number(s.variance, 1), _number(s.kept)))
                    for s in found
                ),
            ]
        )
    return _table(f"Markov policy, {mismatch}, by response length", columns, cells)


def _products(chains: Mapping[tuple[str, int], Chain]) -> str:
    found = [f"{chain.ess_of_products:.2g} ({mismatch}, {n:,})" for (mismatch, n), chain in chains.items()]
    return (
        "\nEffective sample size of the uncapped product of ratios, exact, as a part of the responses: "
        f"{', '.join(found)}. It is unbiased at every length. Where that part of all responses is a few, a "
        "sample no longer shows it, and its standard error is too small as well.\n"
    )


def _listed(lengths: Iterable[int]) -> str:
    words = [f"{n:,}" for n in lengths]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _sentences(rows: Mapping[str, Row], longest: int, responses: int) -> str:
    base = rows[NONE]
    cells = [
        [_code(name), _cost(row.correction), sentence(row, base, longest, responses)]
        for name, row in rows.items()
        if name != NONE
    ]
    head = [
        "\n## What follows, stale\n",
        f"| method | needs | against no correction, on 4 tokens and on {longest:,} |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in cells), ""])


def sentence(row: Row, base: Row, length: int, responses: int) -> str:
    """Against no correction, stale: bias, variance and what is kept, in both laboratories."""
    f, f0 = row.exact["stale"], base.exact["stale"]
    short = _compared(f.bias / f.true, f0.bias / f0.true, 0.0, f.variance / f0.variance, f.kept)
    s, s0 = row.sampled["stale", length], base.sampled["stale", length]
    if s.ess * responses < FEW:
        return f"{short}; {length:,}: {s.ess * responses:.0f} of {responses:,} responses carry the mean"
    return f"{short}; {length:,}: {_compared(s.bias, s0.bias, s.error, s.variance / s0.variance, s.kept)}"


def _compared(bias: float, base: float, error: float, variance: float, kept: float) -> str:
    if kept < 0.005:
        return "keeps nothing"
    if abs(bias - base) <= max(2 * error, CLEAR * base):
        of_bias = f"bias {_number(bias)}, as without"
    else:
        of_bias = f"bias {_number(base)} → {_number(bias)}"
    of_variance = "the same variance" if abs(variance - 1) < CLEAR else f"{variance:.2g} times the variance"
    return f"{of_bias}, {of_variance}" + (f", {kept:.0%} kept" if kept < 1 - CLEAR else "")

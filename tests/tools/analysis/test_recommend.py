"""The recommendation: what it says of runs of which the answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime_ext import tis
from slime_ext.core.metrics.names import HEALTHY
from slime_ext.hosts import contract
from slime_ext.tools import decision
from slime_ext.tools.analysis.document import Effect, Finding, Numbers
from slime_ext.tools.analysis.findings import DETECTORS
from slime_ext.tools.analysis.findings.recommend import flags, must_wait, recommend
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse
from tests.tools.analysis import dumps
from tests.tools.analysis.detectors.toys import lagging

ROOT = Path(__file__).parents[3]

SHORT = Numbers(
    tokens=1000,
    sequences=100,
    k3=1e-3,
    ess_sequence=0.6,
    chi2_sequence=0.01,
    ess_token=0.9,
    response_length=10,
)
ALL = ("importance_sampling", "token_tis", "icepop", "skyrl_geo_mask")


def effect(name, **changes):
    good = {"tokens": 1000, "kept_tokens": 1000, "sequences": 100, "kept_sequences": 100, "ess": 0.9}
    return Effect(
        name=name, **good | {"kept_positive": 1.0, "kept_negative": 1.0, "gradient_scale": 1.0} | changes
    )


def effects(**changes):
    return [effect(name, **changes.get(name, {})) for name in ALL]


def finding(name="temperature", severity="error"):
    return Finding(name=name, severity=severity, title="T", evidence="E", fix="F")


def said(**changes):
    """Returns the recommendation for a run; ``changes`` are numbers, findings and keywords of recommend."""
    keywords = ("rollouts_per_push", "flags_of_run")
    about_run = {key: changes.pop(key) for key in keywords if key in changes}
    findings = changes.pop("findings", ())
    return recommend(effects(), replace(SHORT, **changes), findings, **about_run)


STALE = finding("stale_weights", "warning")
NOISE = finding("quantised", "warning")


@pytest.mark.parametrize("page", ["README.md", "SKILL.md"])
def test_a_page_has_the_decision_table(page):
    assert f"\n{decision.markdown()}\n" in (ROOT / page).read_text()


def test_the_limit_is_the_highest_healthy_k3():
    assert HEALTHY["k3_kl"] == (None, decision.K3_LIMIT)


@pytest.mark.parametrize(
    ("run", "row", "why"),
    [
        ({"k3": 4.9e-3}, decision.NEAR, "(k3 0.0049; nothing tells"),
        ({"k3": 5.1e-3}, decision.FAR, "(k3 0.0051; nothing tells"),
        (
            {"k3": 4e-3, "findings": (STALE,)},
            decision.LAGGING,
            "(k3 0.004; the finding stale_weights says so)",
        ),
        ({"staleness": 1.0}, decision.LAGGING, "the weights are 1 versions old in the mean"),
        ({"staleness": 0.95}, decision.LAGGING, "0.95 versions old"),  # one push, but rollout 0 is fresh
        ({"staleness": 0.4}, decision.NEAR, "nothing tells"),
        ({"least_staleness": 0.6}, decision.LAGGING, "the weights are at least 0.6 rollouts old"),
        ({"least_staleness": 0.1, "most_staleness": 0.4}, decision.NEAR, "nothing tells"),
        ({"rollouts_per_push": 4}, decision.LAGGING, "pushed after every 4 rollouts"),
        (
            {"rollouts_per_push": 4, "staleness": 0.0},
            decision.NEAR,
            "nothing tells",
        ),  # train.py pushes always
        ({"flags_of_run": {"update_weights_interval": 3}}, decision.LAGGING, "pushed after every 3 rollouts"),
        ({"findings": (NOISE,)}, decision.ROUNDED, "the finding quantised says so"),
        ({"flags_of_run": {"sglang_quantization": "fp8"}}, decision.ROUNDED, "has sglang_quantization fp8"),
        ({"flags_of_run": {"sglang_quantization": None}}, decision.NEAR, "nothing tells"),
        (
            {"flags_of_run": {"hf_checkpoint": "/m/Qwen3-4B-FP8/"}},
            decision.ROUNDED,
            "has hf_checkpoint /m/Qwen3-4B",
        ),
        ({"findings": (NOISE, STALE)}, decision.LAGGING, "the finding stale_weights"),
    ],
)
def test_the_row_that_applies_is_named_with_the_reason(run, row, why):
    made = said(**run)
    assert made.is_made and made.reasons[0].startswith(decision.plain(row.run)) and why in made.reasons[0]
    assert made.name == ("token_tis" if row.trial else "metrics_only")
    if row.trial:
        assert made.reasons[1] == decision.plain(row.advice) and made.flags == flags("token_tis")
        assert made.reasons[2].startswith("token_tis: it would have kept 100.0% of the sequences")


def test_weights_that_are_pushed_after_every_rollout_cannot_be_pushed_more_often():
    made = said(staleness=1.0, rollouts_per_push=1)
    assert made.reasons[1].startswith("halve the learning rate") and "push" not in made.reasons[1]


def test_what_is_recommended_has_its_flags_and_what_is_not_only_measures():
    """No text says to try a correction beside flags that only measure, and no text ranks two presets."""
    costly = effects(token_tis={"ess": 0.1})
    for changes in ({}, {"k3": 0.02}, {"staleness": 3.0}, {"findings": (STALE,)}, {"findings": (NOISE,)}):
        total = replace(SHORT, **{k: v for k, v in changes.items() if k != "findings"})
        for evaluated in (effects(), costly):
            made = recommend(evaluated, total, changes.get("findings", ()))
            is_trial = "compare runs with" in " ".join(made.reasons).lower()
            assert is_trial == (made.flags == flags("token_tis")) == (made.name == "token_tis")
            assert "importance_sampling" not in " ".join(made.reasons)


def test_what_nothing_explains_is_no_reason_to_train_on():
    made = said(findings=(finding("unexplained", "warning"),))
    assert "has an unknown cause" in made.reasons[0] and not made.candidates and not made.is_made


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({"kept_sequences": 60}, "reject 40%"),
        ({"clipped_tokens": 300}, "clip 30%"),
        ({"ess": 0.2}, "leave an effective sample size of 0.2"),
        ({"kept_negative": 0.5}, "50% of the negative"),
        ({"gradient_scale": 0.1}, "gradient by 0.1"),
        ({"unavailable": "needs advantages"}, "needs advantages"),
    ],
)
def test_a_trial_that_costs_too_much_is_none_and_the_reason_is_said(cost, words):
    files = {"mine.yaml": str(ROOT / "configs/modes/stale.yaml")}
    made = recommend(effects(token_tis=cost), SHORT, (STALE,))
    assert made.name == "metrics_only" and words in made.reasons[-1] and made.flags == contract.INIT_FLAG
    assert [(c.name, c.chosen) for c in made.candidates] == [("token_tis", False)]
    own = recommend([effect("mine.yaml"), *effects(token_tis=cost)], SHORT, (STALE,), files)
    assert own.name == "mine.yaml" and own.flags == flags("mine.yaml", files["mine.yaml"])
    assert [(c.name, c.chosen) for c in own.candidates] == [("token_tis", False), ("mine.yaml", True)]


def test_of_what_a_dump_cannot_tell_nothing_is_recommended():
    for changes, words in (
        ({"or_else": ("stale_weights",)}, "the dump cannot tell which"),
        ({"says": "symptom"}, "not known to be the whole cause"),
    ):
        either = replace(finding("quantised", "warning"), **changes)
        made = said(findings=[either], k3=0.4)
        assert not made.is_made and not made.candidates and made.name == "metrics_only"
        assert made.reasons[0].startswith("quantised") and words in made.reasons[0]


# Findings beside which a correction may be recommended: the table has a row for the first two, and the others
# are about samples and rewards.
GO_ON = {"stale_weights", "quantised", "duplicate_samples", "left_out", "length_explosion", "no_advantage"}
GO_ON |= {"reward_collapse", "selection_bias"}


@pytest.mark.parametrize("name", DETECTORS)
def test_a_recommendation_waits_for_every_fault_that_a_correction_would_hide(name):
    """Over all detectors: nothing is recommended beside an error, an open cause or another warning."""
    plain, error = finding(name, "warning"), finding(name, "error")
    either = replace(plain, or_else=("routing_flips",))
    symptom = replace(plain, says="symptom")
    for one, waits in [(plain, name not in GO_ON), (error, True), (either, True), (symptom, True)]:
        made = said(findings=[one], k3=0.2, staleness=2.0)
        assert must_wait(one) is waits is not made.is_made, one.severity
        if waits and name != "unexplained":  # whose reason is that the cause is unknown
            assert made.name == "metrics_only" and name in made.reasons[0]
    assert not must_wait(finding(name, "note")) and said(findings=[finding(name, "note")]).is_made


def test_where_no_candidate_was_evaluated_it_says_so():
    made = recommend([effect("geo_rs")], SHORT, (STALE,))
    assert made.reasons[-1] == "token_tis was not evaluated: leave out --presets"


def test_what_a_dump_does_not_tell_is_read_from_the_flags_beside_it(tmp_path):
    for each in lagging(0.6):
        texts = {"prompts": ("p",) * each.count, "responses": ("r",) * each.count}
        path = dumps.write_train(tmp_path, replace(each, **texts))
        torch.save(torch.load(path, weights_only=False) | {"dp_shards": []}, path)
        dumps.write_rollout(tmp_path, replace(each, **texts))
    for interval, begin in [
        (None, "push them more often"),
        (1, "halve the learning rate"),
        ("y", "push them more often"),
    ]:
        (tmp_path / "args.json").write_text(json.dumps({"update_weights_interval": interval}))
        request = Request((str(tmp_path),), presets=("token_tis",))
        made = analyse(request, request.files()).recommendation
        assert made.is_made and made.reasons[1].startswith(begin)


def test_the_page_says_how_many_faults_are_known():
    assert f" of {len(DETECTORS)} checks ran, " in (ROOT / "docs/analyze.md").read_text()


def test_of_few_sequences_nothing_is_recommended():
    for sequences, is_made in [(99, False), (100, True)]:
        for changes in [{}, {"ess_sequence": 1.0}]:
            found = recommend(effects(), replace(SHORT, sequences=sequences, **changes))
            assert found.is_made is is_made
            assert found.reasons[0].startswith(f"too few sequences ({sequences})") is not is_made


def test_a_fault_comes_before_a_recommendation():
    one = finding()
    for explains, words in ((0.9, "a correction would only hide it"), (None, "no correction repairs it")):
        found = recommend(effects(), SHORT, (replace(one, explains=explains),))
        assert not found.is_made and found.reasons[0] == f"fix temperature first, because {words}"


def test_where_nothing_can_be_compared_nothing_is_concluded():
    for tokens in [0, 7]:
        found = recommend(effects(), Numbers(tokens=tokens, nonfinite=tokens))
        assert found.name == "metrics_only" and found.reasons[0].startswith("no response token has finite")


WHOLE = {"use_tis": True, "custom_tis_function_path": "a.b", "custom_megatron_init_path": "a.c"}


def test_the_flags_of_a_file_make_up_for_the_keys_that_it_lacks(tmp_path):
    for number, (keys, preset, more) in enumerate(
        [
            (WHOLE, "token_tis", ""),
            (WHOLE | {"use_tis": False}, "token_tis", ""),  # a flag cannot change what a file says
            ({}, "token_tis", " --use-tis --custom-tis-function-path slime_ext.tis.correct"),
            ({"use_tis": True}, "token_tis", " --custom-tis-function-path slime_ext.tis.correct"),
            (WHOLE, "m2", " --get-mismatch-metrics"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (file := folder / "mine.yaml").write_text(json.dumps({**keys, "slime_ext": {"preset": preset}}))
        init = "" if "custom_megatron_init_path" in keys else f" {contract.INIT_FLAG}"
        assert flags("mine", str(file)) == f"--custom-config-path {file}{more}{init}"


def test_flags_name_a_function_that_exists():
    switch, option, path, *init = flags("token_tis").split()
    assert init == ["--custom-megatron-init-path", "slime_ext.host.init"] and switch == "--use-tis"
    assert option == "--custom-tis-function-path" and callable(getattr(tis, path.rpartition(".")[2]))


def test_to_measure_on_is_the_one_flag_of_the_readme_and_none_before_a_fault_is_fixed():
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    assert (
        flags("metrics_only") == contract.INIT_FLAG
        and f"\n{contract.INIT_FLAG} --dump-details DIR\n" in readme
    )
    for total, findings, wanted in [
        (SHORT, [finding()], ""),
        (SHORT, [finding("unexplained", "warning")], contract.INIT_FLAG),
        (replace(SHORT, sequences=5), [], contract.INIT_FLAG),
        (replace(SHORT, ess_sequence=0.995), [], contract.INIT_FLAG),
    ]:
        assert recommend(effects(), total, findings).flags == wanted

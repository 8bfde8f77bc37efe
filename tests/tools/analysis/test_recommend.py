"""The recommendation: what it says of runs of which the answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from slime_ext import tis
from slime_ext.hosts import contract
from slime_ext.tools.analysis import evidence
from slime_ext.tools.analysis.document import Effect, Finding, Numbers
from slime_ext.tools.analysis.findings import DETECTORS
from slime_ext.tools.analysis.findings import recommend as recommend_module
from slime_ext.tools.analysis.findings.recommend import flags, recommend
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse
from tests.tools.analysis import dumps
from tests.tools.analysis.detectors.toys import lagging

FOLDER = Path(evidence.__file__).parent

SHORT = Numbers(
    tokens=1000,
    sequences=100,
    k3=1e-3,
    ess_sequence=0.6,
    chi2_sequence=0.01,
    ess_token=0.9,
    response_length=10,
)
ALL = (
    "importance_sampling",
    "token_tis",
    "fireworks_token",
    "icepop",
    "kpop",
    "cispo",
    "decoupled_geo_rs_token_tis",
    "skyrl_geo_mask",
)


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
    """What is said of a run; findings and what recommend takes by keyword are not of its numbers."""
    keywords = ("findings", "k3", "steps", "rollouts_per_push")
    given = {key: changes.pop(key) for key in keywords if key in changes}
    return recommend(effects(), SHORT.model_copy(update=changes), given.pop("findings", ()), **given)


STALE = finding("stale_weights", "warning")
LAG = {"findings": (STALE,), "k3": 0.02}  # nats, where no run of ours was
LARGE = {"k3": 0.015}  # nats, where no run of ours without a lag was


def test_where_no_run_of_ours_was_it_says_so_and_what_to_run():
    for changes, kind, first, trial in [
        (LARGE, "without a known lag", "wider number format", "token_tis"),
        ({"findings": (STALE,)}, "from older weights", "lower the learning rate", "token_tis"),
        ({"staleness": 9.0}, "from older weights", "push weights more often", "token_tis"),
        ({"response_length": 4e3, **LARGE}, "without a known lag", "wider number format", "token_tis"),
    ]:
        made = said(**changes)
        assert (made.name, made.is_made) == ("metrics_only", True)
        assert "none of our runs is like this" in made.reasons[0] and kind in made.reasons[0]
        ranges = made.reasons[0].partition("we measured k3 ")[2].partition(";")[0].split(", ")
        lows = [float(one.partition(" to ")[0]) for one in ranges]
        assert lows == sorted(lows) and len({*ranges}) == len(ranges)  # the INT4 runs are scored twice
        assert first in made.reasons[1]
        assert f"with and without {trial}: " in made.reasons[2] and "would have kept" in made.reasons[3]


def test_where_runs_of_ours_were_it_says_what_they_measured():
    """The table's own ranges and numbers, read without the code that reads it."""
    table = yaml.safe_load((FOLDER / "evidence.yaml").read_text())
    decides = ("mismatch", "steps_per_rollout", "rollouts_per_push")
    for condition in (c for c in table["conditions"] if c["k3"]):
        findings = (STALE,) if condition["mismatch"] == "lag" else ()
        of = {"steps": condition["steps_per_rollout"], "rollouts_per_push": condition["rollouts_per_push"]}
        for k3 in condition["k3"]:
            # Of the conditions that a run meets, the first decides.
            first = next(
                c
                for c in table["conditions"]
                if all(c[key] == condition[key] for key in decides)
                and c["k3"]
                and c["k3"][0] <= k3 <= c["k3"][1]
            )
            helped = [
                r["preset"]
                for r in first["remedies"]
                if r["p"] < table["significance"] and r["effect"] > 0 and r["preset"] in ALL
            ]
            # Which policy will be served decides under INT4, and the dump does not tell.
            wanted = "metrics_only" if first["scored"] else (*helped, "metrics_only")[0]
            made = said(findings=findings, k3=k3, **of)
            text = " ".join(made.reasons)
            assert made.name == wanted and condition["panels"][0] in text
            for r in condition["remedies"]:
                effect, *bounds = (
                    f"{r[key]:.2f}".replace("-0.00", "0.00") for key in ("effect", "low", "high")
                )
                sign = "" if effect.startswith("-") else "+"
                assert f"{r['remedy']} {sign}{effect} ({bounds[0]} to {bounds[1]}, " in text
            served = condition["scored"].partition(",")[0]
            rounded = f"if your sampler's weights are rounded like theirs and you serve {served}, "
            assert rounded in text if served else "you serve" not in text
            if served:
                assert "you serve the trainer's weights, " in text
                assert "if your sampler's weights are not rounded, these runs do not tell: " in text
            is_healthy = k3 <= 5e-3 and not findings
            assert ("needs no correction" in text) == is_healthy
            assert ("to find out" in text) == (condition["mismatch"] == "lag" and not helped)
        alike = [c["k3"] for c in table["conditions"] if c["mismatch"] == condition["mismatch"] and c["k3"]]
        low, high = condition["k3"]
        for k3, steps in ((low * 0.99, 1), (high * 1.01, 1), (low, condition["steps_per_rollout"] + 5)):
            if steps == 1 and any(lowest <= k3 <= highest for lowest, highest in alike):
                continue  # another condition covers it
            if k3 <= 5e-3 and not findings:
                continue  # healthy, so no run is asked
            assert "none of our runs is like this" in said(findings=findings, k3=k3, steps=steps).reasons[0]
        other = () if findings else (STALE,)
        assert condition["what"] not in " ".join(said(findings=other, k3=high, steps=1).reasons)


EVERY = {2: "every second rollout", 4: "every fourth rollout", 8: "every eighth rollout"}


@pytest.mark.parametrize(("k3", "other"), [(0.155, 2), (0.343, 8)])
def test_what_helped_under_a_lag_of_four_is_recommended_under_no_other(k3, other):
    """The ranges of k3 overlap: each of these is in the range of a lag of 4, and in that of another."""
    lagging = {"findings": (STALE,), "k3": k3, "steps": 1}
    for push, name in [(4, "importance_sampling"), (other, "metrics_only")]:
        made = said(rollouts_per_push=push, **lagging)
        text = " ".join(made.reasons)
        assert made.name == name and [lag for lag, words in EVERY.items() if words in text] == [push]
    unknown = said(**lagging)
    text = " ".join(unknown.reasons)
    assert unknown.name == "metrics_only" and "(update_weights_interval)" in text
    for push, what in [(4, "try "), (other, "no correction is shown")]:
        assert f"with 1 optimizer step per rollout and weights pushed every {push} rollouts, {what}" in text
    of_none = said(rollouts_per_push=1, **lagging).reasons[0]  # asynchronous
    assert "weights pushed after every rollout: none of our runs is like this" in of_none


def test_a_lag_that_only_the_flags_tell_is_a_lag():
    """Under a lag of two rollouts the ages are 0 and 1, and train.py pushes whatever the flag says."""
    for staleness, kind in [
        (0.5, "from older weights"),
        (None, "from older weights"),
        (0.0, "without a known lag"),
    ]:
        reasons = said(staleness=staleness, k3=0.1, steps=1, rollouts_per_push=2).reasons
        assert kind in reasons[0], staleness


@pytest.fixture
def changed(monkeypatch):
    """The table with other numbers for one arm of `lag`."""

    def change(arm, **numbers):
        table = evidence.evidence()
        lag, *others = table.conditions
        remedies = tuple(r.model_copy(update=numbers) if r.arm == arm else r for r in lag.remedies)
        new = table.model_copy(
            update={"conditions": (lag.model_copy(update={"remedies": remedies}), *others)}
        )
        for module in (evidence, recommend_module):
            monkeypatch.setattr(module, "evidence", lambda: new)

    return change


def test_a_preset_that_helped_in_runs_like_this_one_is_recommended(changed):
    changed("E", p=0.01, effect=0.2)
    costly = {}
    for name in ("importance_sampling", "icepop", "token_tis"):  # in the order of the table
        made = recommend(effects(**costly), SHORT, (STALE,), k3=0.2, steps=1, rollouts_per_push=4)
        assert (made.name, made.candidates[-1].chosen) == (name, True) and made.flags == flags(name)
        assert "it helped in our runs" in made.reasons[-2]
        costly[name] = {"ess": 0.1}
    assert said(findings=(STALE,), k3=0.02).name == "metrics_only"
    last = recommend(effects(**costly), SHORT, (STALE,), k3=0.2, steps=1, rollouts_per_push=4)
    assert last.name == "metrics_only" and last.candidates[0].reason == "effective sample size 0.1"


def test_a_preset_that_did_harm_in_runs_like_this_one_is_not_tried(changed):
    changed("C", p=0.01, effect=-0.2)
    made = recommend(
        effects(importance_sampling={"ess": 0.1}), SHORT, (STALE,), k3=0.2, steps=1, rollouts_per_push=4
    )
    assert made.candidates[1].name == "token_tis" and "did harm in our runs" in made.candidates[1].reason
    assert "with and without icepop: " in made.reasons[-2]


def test_without_the_number_of_optimizer_steps_it_says_what_holds_for_each():
    lagging = {"findings": (STALE,), "rollouts_per_push": 4}
    both = said(k3=0.2, **lagging)
    assert both.name == "metrics_only" and both.is_made
    text = " ".join(both.reasons)
    assert "how many optimizer steps a rollout has (num_steps_per_rollout)" in text
    lag = next(condition for condition in evidence.evidence().conditions if condition.name == "lag")
    gained = " or ".join(remedy.remedy for remedy in lag.remedies if remedy.preset and remedy.helped)
    one = "with 1 optimizer step per rollout and weights pushed every 4 rollouts, "
    assert f"{one}try {gained}, which gained there" in text
    assert "with 4 optimizer steps per rollout and " in text and "to find out" not in text
    one = said(k3=0.5, **lagging)
    assert one.name == "importance_sampling"
    assert any("(num_steps_per_rollout); these runs have 1 optimizer step" in x for x in one.reasons)
    known = said(k3=0.2, steps=1, **lagging)
    assert known.name == "importance_sampling" and "the dump does not tell" not in " ".join(known.reasons)


def test_what_a_dump_does_not_tell_is_read_from_the_flags_beside_it(tmp_path):
    for rollout in lagging(0.6):
        texts = {"prompts": ("p",) * rollout.count, "responses": ("r",) * rollout.count}
        path = dumps.write_train(tmp_path, replace(rollout, **texts))
        torch.save(torch.load(path, weights_only=False) | {"dp_shards": []}, path)
        dumps.write_rollout(tmp_path, replace(rollout, **texts))
    for steps, push, said_of in [
        (None, None, ""),
        (3, 5, ", 3 optimizer steps per rollout, weights pushed every 5 rollouts"),
        ("x", "y", ""),
    ]:
        flags_of_run = {"num_steps_per_rollout": steps, "update_weights_interval": push}
        (tmp_path / "args.json").write_text(json.dumps(flags_of_run))
        request = Request((str(tmp_path),), presets=("metrics_only",))
        (reason, *_) = analyse(request, request.files()).recommendation.reasons
        assert f" from older weights{said_of}: " in reason


def test_engines_whose_policies_differ_healthily_need_nothing():
    """Both the median over rollouts and the mean over tokens count; a warning changes nothing."""
    needed = "needs no correction, because it is at most 0.005"
    for of_tokens, of_rollouts, is_healthy in [
        (3e-3, 4e-3, True),
        (3e-3, 6e-3, False),
        (6e-3, 4e-3, False),
    ]:
        total = SHORT.model_copy(update={"k3": of_tokens})
        for findings in ((), (finding("quantised", "warning"),)):
            made = recommend(effects(), total, findings, k3=of_rollouts)
            assert made.name == "metrics_only" and made.is_made
            assert (made.reasons == (f"k3 {of_rollouts} {needed}",)) == is_healthy


def test_what_nothing_explains_is_no_reason_to_train_on():
    found = recommend(effects(), SHORT, (finding("unexplained", "warning"),))
    assert "has an unknown cause" in found.reasons[0] and not found.candidates


def test_a_candidate_that_costs_too_much_is_passed_over_with_the_reason():
    for cost, word in [
        ({"kept_sequences": 60}, "reject 40%"),
        ({"clipped_tokens": 300}, "clip 30%"),
        ({"ess": 0.2}, "effective sample size 0.2"),
        ({"kept_negative": 0.5}, "50% of the negative"),
        ({"gradient_scale": 0.1}, "gradient by 0.1"),
        ({"unavailable": "needs advantages"}, "needs advantages"),
    ]:
        found = recommend(effects(token_tis=cost), SHORT, **LAG)
        assert [(c.name, c.chosen) for c in found.candidates] == [
            ("token_tis", False),
            ("importance_sampling", True),
        ]
        assert word in found.candidates[0].reason and "without importance_sampling: " in found.reasons[-2]


def test_the_reasons_are_those_of_what_is_to_be_tried():
    total = SHORT.model_copy(update={"staleness": 9.0, "response_length": 4000.0, "k3": 0.02})
    assert "lag 9 versions" in recommend(effects(), total).reasons[-2]
    costly = {name: {"ess": 0.1} for name in ("importance_sampling", "token_tis", "icepop")}
    long = recommend(effects(**costly), total).reasons[-2]
    assert "responses of 4,000 tokens" in long and "lag" not in long


def test_weights_without_a_cap_come_last_where_a_clip_acts_or_answers_are_long():
    lag = {"findings": (STALE,), "steps": 1, "rollouts_per_push": 4}
    for length, name in [(10, "importance_sampling"), (4e3, "token_tis")]:
        assert said(k3=0.2, response_length=length, **lag).name == name
    costly = effects(token_tis={"ess": 0.1})
    for length, steps, name in [(10, 1, "importance_sampling"), (4e3, 1, "icepop"), (10, 4, "icepop")]:
        total = SHORT.model_copy(update={"response_length": length})
        made = recommend(costly, total, (STALE,), k3=0.02, steps=steps)
        assert made.name == "metrics_only" and f"with and without {name}: " in made.reasons[-2]


def test_of_what_a_dump_cannot_tell_nothing_is_recommended():
    for changes in ({"or_else": ("stale_weights",)}, {"says": "symptom"}):
        either = finding("quantised", "warning").model_copy(update=changes)
        made = said(findings=[either], k3=0.4, steps=1)
        assert not made.is_made and not made.candidates and made.name == "metrics_only"
        assert made.reasons[0].startswith("quantised") and "the dump cannot tell which" in made.reasons[0]


def test_without_a_known_lag_token_tis_is_a_trial_and_no_recommendation():
    for k3, how in [(0.006, "are not rounded"), (0.05, "to find out"), (0.29, "to find out")]:
        for findings in ((), (finding("quantised", "warning"),), (finding("routing_flips", "warning"),)):
            made = said(findings=findings, k3=k3, steps=1)
            assert made.name == "metrics_only" and [c.name for c in made.candidates] == ["token_tis"]
            assert how in made.reasons[-2] and "with and without token_tis: " in made.reasons[-2]


def test_a_healthy_lag_of_one_needs_nothing():
    note = finding("stale_weights", "note")
    for changes, needs in [
        ({"findings": (note,), "k3": 4e-3, "staleness": 1.0}, False),
        ({"findings": (note,), "k3": 6e-3, "staleness": 1.0}, True),
        ({"findings": (note,), "k3": 4e-3, "staleness": 1.5}, True),  # the mean age under a lag of four
        ({"findings": (note,), "k3": 4e-3, "staleness": 1.0, "rollouts_per_push": 2}, True),
        ({"findings": (STALE,), "k3": 4e-3, "staleness": 1.0}, True),
    ]:
        assert (said(**changes).reasons[0].startswith("a healthy lag of one")) != needs


def test_what_helped_beside_the_evaluated_presets_is_named_with_what_it_needs():
    lag = next(condition for condition in evidence.evidence().conditions if condition.name == "lag")
    gains = {remedy.preset: str(remedy) for remedy in lag.remedies}
    for kl, is_told in [(None, True), (0.1, False)]:
        reasons = said(findings=(STALE,), k3=0.2, steps=1, rollouts_per_push=4, kl=kl).reasons
        of = {name: [text for text in reasons if f"the preset {name}:" in text] for name in gains}
        assert {name for name, texts in of.items() if texts} == {"score_centering"}
        (text,) = of["score_centering"]
        assert text.startswith(f"a candidate is {gains['score_centering']}, ")
        assert ("slime_ext.host.generate" in text) == is_told
    one = " ".join(
        recommend([effect("geo_rs")], SHORT, (STALE,), k3=0.2, steps=1, rollouts_per_push=4).reasons
    )
    for name in ("importance_sampling", "score_centering", "token_tis"):
        assert f"a candidate is {gains[name]}, the preset {name}:" in one
    assert "a candidate" not in " ".join(said(k3=0.45, steps=1).reasons)


def test_what_gained_more_than_the_preset_and_is_none_is_named_before_it():
    lag = next(condition for condition in evidence.evidence().conditions if condition.name == "lag")
    found = said(findings=(STALE,), k3=0.2, steps=1, rollouts_per_push=4)
    chosen = lag.of(found.name)
    better = [str(r) for r in lag.remedies if r.preset is None and r.helped and r.effect > chosen.effect]
    line = f"these gained more, so try what you can of them first: {', '.join(better)}"
    assert line in found.reasons and any("half of the learning rate" in text for text in better)
    assert not any("these gained more" in text for text in said(findings=(STALE,), k3=0.035, steps=1).reasons)


def test_where_everything_costs_too_much_it_says_so():
    bad = {name: {"ess": 0.01} for name in ALL}
    found = recommend(effects(**bad), SHORT, **LAG)
    assert found.name == "metrics_only" and "every candidate costs too much" in found.reasons[-1]


def test_where_no_candidate_was_evaluated_it_says_so():
    for at in (LAG, LAG | {"k3": 0.2, "steps": 1, "rollouts_per_push": 4}):
        found = recommend([effect("geo_rs")], SHORT, **at)
        assert found.reasons[-1] == "no candidate was evaluated: leave out --presets"


def test_the_readme_says_how_many_faults_are_known():
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    assert f"`slime-ext analyze` knows {len(DETECTORS)} faults." in " ".join(readme.split())


def test_of_few_sequences_nothing_is_recommended():
    for sequences, is_made in [(99, False), (100, True)]:
        for changes in [{}, {"ess_sequence": 1.0}]:
            found = recommend(effects(), SHORT.model_copy(update={"sequences": sequences, **changes}))
            assert found.is_made is is_made
            assert found.reasons[0].startswith(f"too few sequences ({sequences})") is not is_made


def test_a_fault_comes_before_a_recommendation():
    found = recommend(effects(), SHORT, (finding(),))
    assert not found.is_made
    assert found.reasons[0] == "fix temperature first, because a correction would only hide it"


def test_where_nothing_can_be_compared_nothing_is_concluded():
    for tokens in [0, 7]:
        found = recommend(effects(), Numbers(tokens=tokens, nonfinite=tokens))
        assert found.name == "metrics_only" and found.reasons[0].startswith("no response token has finite")


WHOLE = {"use_tis": True, "custom_tis_function_path": "a.b", "custom_megatron_init_path": "a.c"}


def test_the_users_own_file_is_to_be_tried_where_every_preset_costs_too_much():
    own = {"files": {"mine.yaml": "mine.yaml"}, **LAG}
    made = recommend([effect("mine.yaml"), *effects()], SHORT, **own)
    assert "without token_tis: " in made.reasons[-2]
    bad = {name: {"ess": 0.01} for name in ALL}
    found = recommend([effect("mine.yaml"), *effects(**bad)], SHORT, **own)
    assert found.reasons[-2].endswith("every preset that fits costs too much, but your file costs little")


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
    assert flags("metrics_only") == contract.INIT_FLAG and f"    {contract.INIT_FLAG}\n" in readme
    for total, findings, wanted in [
        (SHORT, [finding()], ""),
        (SHORT, [finding("unexplained", "warning")], contract.INIT_FLAG),
        (SHORT.model_copy(update={"sequences": 5}), [], contract.INIT_FLAG),
        (SHORT.model_copy(update={"ess_sequence": 0.995}), [], contract.INIT_FLAG),
    ]:
        assert recommend(effects(), total, findings).flags == wanted


@pytest.mark.parametrize(
    ("effects", "wanted"),
    [
        ({"C": 0.2, "S": -0.2}, "try token_tis, which gained there; score centering did harm there"),
        ({"C": -0.2, "S": 0.0}, "train uncorrected; token_tis did harm there"),
        ({"C": 0.0, "S": 0.0}, "no correction is shown to gain or to harm: evaluate a run with"),
    ],
)
def test_how_to_train_for_a_policy_follows_from_the_runs_that_were_scored_with_it(effects, wanted):
    (of_int4,) = (c for c in evidence.evidence().conditions if c.name == "int4")
    remedies = [r for r in of_int4.remedies if r.arm in effects]
    made = [
        r.model_copy(update={"effect": effects[r.arm], "p": 0.01 if effects[r.arm] else 0.9})
        for r in remedies
    ]
    assert recommend_module._how_to_train([of_int4.model_copy(update={"remedies": tuple(made)})]).startswith(
        wanted
    )

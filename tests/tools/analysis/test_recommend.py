"""The recommendation: what it says of runs of which the answer is known."""

from __future__ import annotations

import json
import math

from slime_ext import tis
from slime_ext.host import contract
from slime_ext.tools.analysis.document import Effect, Finding, Numbers
from slime_ext.tools.analysis.findings.recommend import flags, recommend

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


def test_the_situation_decides():
    for changes, findings, name in [
        ({}, (), "token_tis"),
        ({"response_length": 4000.0}, (), "decoupled_geo_rs_token_tis"),
        ({"staleness": 9.0}, (), "token_tis"),
        ({}, (finding("routing_flips", "warning"),), "icepop"),
        ({"ess_sequence": 0.995}, (), "metrics_only"),
        ({"ess_sequence": 1.0, "chi2_sequence": 1.2**2 - 1}, (), "token_tis"),  # all ratios are 1.2
        ({"ess_sequence": 1.0, "chi2_sequence": 0.8**2 - 1}, (), "token_tis"),
        ({"ess_sequence": 1.0, "chi2_sequence": math.inf}, (), "token_tis"),
        ({"ess_sequence": 1.0, "chi2_sequence": 1.05**2 - 1}, (), "metrics_only"),
        ({}, (finding(),), "metrics_only"),
        ({}, (finding("unexplained", "warning"),), "metrics_only"),
    ]:
        assert recommend(effects(), SHORT.model_copy(update=changes), findings).name == name


def test_what_nothing_explains_is_no_reason_to_train_on():
    found = recommend(effects(), SHORT, (finding("unexplained", "warning"),))
    assert "of unknown cause" in found.reasons[0] and not found.candidates


def test_a_candidate_that_costs_too_much_is_passed_over_with_the_reason():
    for cost, word in [
        ({"kept_sequences": 60}, "reject 40%"),
        ({"clipped_tokens": 300}, "clip 30%"),
        ({"ess": 0.2}, "effective sample size 0.2"),
        ({"kept_negative": 0.5}, "50% of the negative"),
        ({"gradient_scale": 0.1}, "gradient by 0.1"),
        ({"unavailable": "needs advantages"}, "needs advantages"),
    ]:
        found = recommend(effects(token_tis=cost), SHORT)
        assert [c.name for c in found.candidates] == ["token_tis", "fireworks_token"]
        assert word in found.candidates[0].reason and found.name == "fireworks_token"


def test_the_reasons_are_those_of_what_is_recommended():
    total = SHORT.model_copy(update={"staleness": 9.0, "response_length": 4000.0})
    lag, gain = recommend(effects(), total).reasons
    assert "lag 9 versions" in lag and "would have kept" in gain
    assert recommend(effects(token_tis={"ess": 0.1}), total).name == "cispo"
    costly = {name: {"ess": 0.1} for name in ("token_tis", "cispo")}
    long, _ = recommend(effects(**costly), total).reasons
    assert "responses of 4,000 tokens" in long and "lag" not in long
    costly |= {name: {"ess": 0.1} for name in ("decoupled_geo_rs_token_tis", "skyrl_geo_mask")}
    found = recommend(effects(**costly), total)
    assert found.name == "fireworks_token" and found.reasons[0].startswith(
        "what fits the situation costs too"
    )


def test_policies_that_are_far_apart_are_recommended_a_correction_with_a_caveat():
    stale = finding("stale_weights", "warning")
    for k3, is_far in ((0.29, False), (0.31, True)):
        made = recommend(effects(), SHORT.model_copy(update={"k3": k3}), [stale])
        assert made.name == "token_tis" and "older weights (stale_weights)" in made.reasons[0]
        assert any("push weights more often first" in reason for reason in made.reasons) == is_far
    far = SHORT.model_copy(update={"k3": 0.31})
    few = recommend(effects(), far.model_copy(update={"sequences": 5}), [stale])
    assert "push weights more often first" not in " ".join(few.reasons)


def test_policies_that_are_far_apart_without_a_lag_are_recommended_no_correction():
    far, rounded = SHORT.model_copy(update={"k3": 0.31}), finding("quantised", "warning")
    for changes, findings, is_none in [
        ({}, [rounded], True),
        ({}, [], True),
        ({"k3": 0.29}, [rounded], False),
        ({"staleness": 1.0}, [rounded], False),
        ({}, [rounded, finding("stale_weights", "warning")], False),
    ]:
        made = recommend(effects(), far.model_copy(update=changes), findings)
        assert (made.name == "metrics_only") == is_none, changes
        assert any("wider number format" in reason for reason in made.reasons) == is_none
    either = rounded.model_copy(update={"or_else": ("stale_weights",)})
    assert any(
        "the dump cannot tell which" in reason for reason in recommend(effects(), far, [either]).reasons
    )


def test_where_everything_costs_too_much_it_says_so():
    bad = {name: {"ess": 0.01} for name in ALL}
    found = recommend(effects(**bad), SHORT)
    assert found.name == "metrics_only" and "too far apart" in found.reasons[0]


def test_of_few_sequences_nothing_is_recommended():
    for sequences, is_made in [(99, False), (100, True)]:
        for changes in [{}, {"ess_sequence": 1.0}]:
            found = recommend(effects(), SHORT.model_copy(update={"sequences": sequences, **changes}))
            assert found.is_made is is_made
            assert found.reasons[0].startswith(f"too few sequences ({sequences})") is not is_made


def test_a_fault_comes_before_a_recommendation():
    found = recommend(effects(), SHORT, (finding(),))
    assert not found.is_made and found.reasons[0].endswith("would only hide it: temperature. F.")


def test_where_nothing_can_be_compared_nothing_is_concluded():
    for tokens in [0, 7]:
        found = recommend(effects(), Numbers(tokens=tokens, nonfinite=tokens))
        assert found.name == "metrics_only" and found.reasons[0].startswith("no response token has a finite")


WHOLE = {"use_tis": True, "custom_tis_function_path": "a.b", "custom_megatron_init_path": "a.c"}


def test_the_users_own_file_is_recommended_where_every_preset_costs_too_much(tmp_path):
    (file := tmp_path / "mine.yaml").write_text(json.dumps({**WHOLE, "slime_ext": {"preset": "token_tis"}}))
    own = {"files": {"mine.yaml": str(file)}}
    assert recommend([effect("mine.yaml"), *effects()], SHORT, **own).name == "token_tis"
    bad = {name: {"ess": 0.01} for name in ALL}
    found = recommend([effect("mine.yaml"), *effects(**bad)], SHORT, **own)
    assert (found.name, found.flags) == ("mine.yaml", f"--custom-config-path {file}")
    assert found.reasons[0] == "no preset that fits costs little, your own file does"


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
    for name in ["token_tis", "metrics_only"]:
        switch, option, path, *init = flags(name).split()
        assert init == ["--custom-megatron-init-path", "slime_ext.host.init"]
        assert option == "--custom-tis-function-path" and callable(getattr(tis, path.rpartition(".")[2]))
        assert switch == {"token_tis": "--use-tis", "metrics_only": "--get-mismatch-metrics"}[name]

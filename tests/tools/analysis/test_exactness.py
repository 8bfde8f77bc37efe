"""``--expect exact``: equal log-probs, a single flipped bit, and a side that lost digits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from slime_ext.tools.analysis.measures.exactness import Exactness
from slime_ext.tools.commands import cli
from tests.tools.analysis import dumps
from tests.tools.analysis.synthetic import World, run

EQUAL = [replace(r, proximal=r.behavior.clone()) for r in run(World(rollouts=3, samples=8, length=90))]
TOKENS = sum(int(r.mask.sum()) for r in EQUAL)


def flipped(rollout, at: int, bit: int = 0):
    """The rollout, with one bit of the trainer's log-prob of token ``at`` changed."""
    proximal = rollout.proximal.clone()
    proximal.view(torch.int32)[at] ^= 1 << bit
    return replace(rollout, proximal=proximal)


def response_token(rollout, sample: int, token: int) -> int:
    at = sum(rollout.lengths[:sample]) + token
    assert rollout.mask[at]
    return at


def analyze(capsys, folder, *words):
    status = cli.main(["analyze", str(folder), "--expect", "exact", *map(str, words)])
    return status, capsys.readouterr().out


def test_equal_log_probs_are_exact(capsys, tmp_path):
    status, out = analyze(capsys, dumps.write_run(tmp_path, EQUAL), "--json", tmp_path / "numbers.json")
    assert status == 0
    assert f"exact: both log-probs of {TOKENS:,} response tokens are equal, bit for bit" in out
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert found["exact"]["differing"] == 0 and found["exact"]["first"] is None
    assert found["total"]["differing_fraction"] == found["total"]["log_ratio_max"] == 0


def test_a_single_flipped_bit_is_found(capsys, tmp_path):
    other = EQUAL[1]
    at = response_token(other, 5, 20)
    changed = flipped(other, at)
    masked = flipped(changed, int((~other.mask).int().argmax())) if not other.mask.all() else changed
    dumps.write_run(tmp_path, [EQUAL[0], masked, EQUAL[2]])
    status, out = analyze(capsys, tmp_path, "--json", tmp_path / "numbers.json")
    sampler, trainer = (float(side[at]).hex() for side in (other.behavior, changed.proximal))
    size = abs(float(other.behavior[at]) - float(changed.proximal[at]))
    assert status == 1
    assert f"not exact: 1 of {TOKENS:,} response tokens differ" in out and f"at most {size:.3g} nats" in out
    assert f"first: rollout 1, sample 5, token 20: sampler {sampler}, trainer {trainer}; 1 bit of 32" in out
    inside = int(other.mask.sum())
    assert f"by rollout: 1: 1 of {inside:,}; 2 exact" in out and "by position: 16-63: " in out
    assert "both sides have more digits than" in out
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert found["total"]["differing_fraction"] == pytest.approx(1 / TOKENS)
    assert found["total"]["log_ratio_max"] == found["exact"]["largest"] == pytest.approx(size)


@pytest.mark.parametrize("side", ["behavior", "proximal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_side_that_lost_digits_is_named(capsys, tmp_path, side, dtype):
    coarse = [replace(r, **{side: getattr(r, side).to(dtype).float()}) for r in EQUAL]
    status, out = analyze(capsys, dumps.write_run(tmp_path, coarse))
    names = {"behavior": "sampler", "proximal": "trainer"}
    (other,) = set(names.values()) - {names[side]}
    name = str(dtype).removeprefix("torch.")
    assert status == 1
    assert f"all log-probs of the {names[side]} are {name} numbers, each that of the {other} rounded" in out


def test_two_coarse_sides_do_not_tell_which(capsys, tmp_path):
    coarse = [replace(r, behavior=r.behavior.bfloat16().float()) for r in EQUAL]
    both = [replace(r, proximal=flipped(replace(r, proximal=r.behavior), 3, bit=16).proximal) for r in coarse]
    status, out = analyze(capsys, dumps.write_run(tmp_path, both))
    assert status == 1 and "all their log-probs are bfloat16 numbers" in out


def test_a_missing_log_prob_is_no_equal_one(capsys, tmp_path):
    behavior = EQUAL[0].behavior.clone()
    behavior[response_token(EQUAL[0], 2, 0)] = torch.nan
    dumps.write_run(tmp_path, [replace(EQUAL[0], behavior=behavior), *EQUAL[1:]])
    status, out = analyze(capsys, tmp_path)
    assert status == 1 and "first: rollout 0, sample 2, token 0: sampler nan, trainer -0x" in out


@pytest.mark.parametrize("value", [-torch.inf, 0.5, -9999.0])
def test_two_equal_values_that_are_no_log_probs_are_not_exact(capsys, tmp_path, value):
    at = response_token(EQUAL[0], 2, 0)
    sides = {name: getattr(EQUAL[0], name).clone() for name in ("behavior", "proximal")}
    for values in sides.values():
        values[at] = value
    dumps.write_run(tmp_path, [replace(EQUAL[0], **sides), *EQUAL[1:]])
    status, out = analyze(capsys, tmp_path)
    assert status == 1 and f"not exact: 1 of {TOKENS:,} response tokens differ" in out
    assert (
        f"trainer {value.hex()}; neither is a log-prob" in out and "digits" not in out and "0 nats" not in out
    )


def test_what_could_not_be_read_is_not_exact(capsys, tmp_path):
    dumps.write_run(tmp_path, EQUAL)
    (tmp_path / "train_data/2.pt").write_bytes(b"cut off")
    assert analyze(capsys, tmp_path)[0] == 1
    file = dumps.write_jsonl(tmp_path / "some.jsonl", EQUAL)
    file.write_text(file.read_text() + '{"cut off')
    status, out = analyze(capsys, file)
    assert status == 1 and "bit for bit, but not everything could be read" in out
    dumps.write_run(tmp_path / "blank", [replace(r, mask=torch.zeros_like(r.mask)) for r in EQUAL])
    status, out = analyze(capsys, tmp_path / "blank")
    assert status == 1 and "not exact: no token to compare" in out


def test_signed_zeros_are_equal_and_parts_of_a_run_add_up():
    zero = replace(EQUAL[0], behavior=torch.zeros(EQUAL[0].size), proximal=-torch.zeros(EQUAL[0].size))
    first, second, whole = Exactness(), Exactness(), Exactness()
    first.add(zero)
    second.add(flipped(EQUAL[2], response_token(EQUAL[2], 3, 1)))
    second.add(flipped(EQUAL[1], response_token(EQUAL[1], 3, 1)))
    for rollout in (zero, *(flipped(r, response_token(r, 3, 1)) for r in EQUAL[1:])):
        whole.add(rollout)
    first.merge(second)
    assert first.comparison() == whole.comparison()
    assert first.comparison().first.rollout_id == 1 and first.comparison().differing == 2


def test_it_is_asked_of_a_whole_run(capsys, tmp_path):
    assert cli.main(["analyze", str(tmp_path), "--follow", "--expect", "exact"]) == 2
    assert "--expect: expected none beside --follow, got one" in capsys.readouterr().err

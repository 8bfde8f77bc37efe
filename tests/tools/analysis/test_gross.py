"""Wrong dumps, written to files and read back: each is named, none is silent."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from slime_ext.tools.analysis.findings import examine
from slime_ext.tools.analysis.readers.vocabulary import vocabulary_of
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse
from slime_ext.tools.commands.cli import main
from tests.tools.analysis import dumps
from tests.tools.analysis.synthetic import World, run
from tests.tools.analysis.test_findings import diagnosed

WORLD = World(rollouts=3, samples=16, length=32)


@pytest.fixture(scope="module")
def rollouts():
    return run(WORLD)


def document(*paths, **more):
    request = Request(tuple(map(str, paths)), presets=("metrics_only",), **more)
    return analyse(request, request.files())


def found(*paths):
    return {f.name: f for f in document(*paths).findings}


def edited(folder, change, kind="train_data"):
    for path in (folder / kind).glob("*.pt"):
        content = torch.load(path, weights_only=True)
        change(content["samples"])
        torch.save(content, path)


def test_masks_of_zeros_are_named_by_rollout(tmp_path, rollouts):
    blank = [replace(r, mask=torch.zeros_like(r.mask)) for r in rollouts]
    every = found(dumps.write_run(tmp_path / "every", blank))
    assert set(every) == {"no_response_tokens"} and "Every token" in every["no_response_tokens"].title
    one = found(dumps.write_run(tmp_path / "one", [rollouts[0], blank[1], rollouts[2]]))
    assert set(one) == {"no_response_tokens"} and one["no_response_tokens"].rollouts == (1,)


def test_a_column_that_is_a_copy_is_named(rollouts):
    copies = [replace(r, proximal=r.behavior) for r in rollouts]
    (note,), _ = examine(diagnosed(copies))
    assert (note.name, note.severity) == ("equal_columns", "note") and "bitwise alike" in note.fix
    (finding,), _ = examine(diagnosed([*rollouts[:2], copies[2]]))
    assert (finding.name, finding.severity, finding.rollouts) == ("equal_columns", "warning", (2,))


def test_samples_that_are_left_out_are_a_finding_and_shares_say_so(tmp_path, rollouts):
    folder = dumps.write_run(tmp_path, [replace(r, behavior=r.behavior.exp()) for r in rollouts])

    def append_twice(rows):
        for row in rows[::2]:
            row["rollout_log_probs"] = torch.cat([row["rollout_log_probs"], torch.zeros(1)])

    edited(folder, append_twice)
    said = found(folder)
    assert set(said) == {"left_out", "positive_log_probs"}
    assert said["left_out"].title.startswith("50% of the samples")
    assert "24 of 48 samples" in said["left_out"].evidence
    assert said["positive_log_probs"].evidence.endswith("Shares are of those samples that were read.")


def test_a_file_that_is_cut_off_is_a_finding(tmp_path, rollouts):
    folder = dumps.write_run(tmp_path, rollouts)
    path = folder / "train_data" / "1.pt"
    path.write_bytes(path.read_bytes()[:1000])
    said = found(folder)
    assert set(said) == {"left_out"} and "1 file or part of one" in said["left_out"].evidence


def test_dumps_of_two_runs_are_told_from_text_that_was_tokenised_again(tmp_path, rollouts):
    mine = dumps.write_run(tmp_path / "mine", rollouts)
    dumps.write_run(tmp_path / "other", run(replace(WORLD, seed=1)))
    shutil.rmtree(mine / "train_data")
    (tmp_path / "other" / "train_data").rename(mine / "train_data")
    (finding,) = document(mine).findings
    assert finding.name == "other_run" and "48 of 48 samples" in finding.evidence
    again = dumps.write_run(tmp_path / "again", rollouts)

    def retokenise(rows):
        for row in rows:
            row["tokens"][-1] += 1

    edited(again, retokenise)
    assert set(found(again)) == {"retokenised"}


def test_rollouts_that_come_back_in_a_file_are_named(tmp_path, rollouts):
    path = dumps.write_jsonl(tmp_path / "run.jsonl", rollouts)
    lines = path.read_text().splitlines()
    assert not found(path)
    path.write_text("\n".join(lines[::2] + lines[1::2]) + "\n")
    (finding,) = document(path).findings
    assert finding.name == "repeated_rollouts" and finding.rollouts == (0, 1, 2)


@pytest.mark.parametrize(("of", "across"), [(0, 0), (1, 16)], ids=["in a rollout", "of an earlier rollout"])
def test_samples_that_are_there_twice_are_named(rollouts, of, across):
    if of:
        harmed = [rollouts[0], replace(rollouts[0], rollout_id=1), rollouts[2]]
    else:
        r = rollouts[0]
        cut = r.lengths[1]  # sample 1 is sample 0 again, as is sample 2
        lists = {name: list(getattr(r, name).split(r.lengths)) for name in ("behavior", "proximal", "tokens")}
        for parts in lists.values():
            parts[1] = parts[2] = parts[0]
        lengths = (r.lengths[0],) * 3 + r.lengths[3:]
        size = sum(lengths)
        assert cut
        harmed = [
            replace(
                r,
                lengths=lengths,
                mask=torch.ones(size, dtype=torch.bool),
                advantages=None,
                entropy=None,
                versions=None,
                newest=None,
                **{name: torch.cat(parts) for name, parts in lists.items()},
            ),
            *rollouts[1:],
        ]
    (finding,), _ = examine(diagnosed(harmed))
    assert finding.name == "duplicate_samples" and f"; {across} of them" in finding.evidence


def test_a_short_response_that_comes_twice_is_chance(rollouts):
    short = [replace(r, behavior=0.1 * r.behavior, proximal=0.1 * r.proximal, entropy=None) for r in rollouts]
    again = [short[0], replace(short[0], rollout_id=1)]
    findings, _ = examine(diagnosed(again))
    assert "duplicate_samples" not in {f.name for f in findings}


def test_ids_without_a_row_are_named_by_whatever_knows_the_vocabulary(tmp_path, rollouts):
    folder = dumps.write_run(tmp_path / "run", rollouts)
    assert not found(folder)
    largest = max(int(r.tokens.max()) for r in rollouts)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": largest}))
    tokenizer = {"model": {"vocab": {"a": 0, "b": largest - 1}}, "added_tokens": [{"id": 3}]}
    for name, flags in [
        ("args.json", {"vocab_size": largest}),
        ("args.json", {"hf_checkpoint": str(model)}),
        ("tokenizer/tokenizer.json", tokenizer),
    ]:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(flags))
        (finding,) = document(folder).findings
        assert finding.name == "outside_vocabulary" and f"0 to {largest - 1}" in finding.evidence
        path.unlink()
    for nonsense in (
        "[]",
        "{",
        '{"vocab_size": -1}',
        '{"vocab_size": "x"}',
        '{"hf_checkpoint": 3}',
        '{"vocab_size": true}',
        '{"vocab_size": 1e30}',
    ):
        (folder / "args.json").write_text(nonsense)
        assert vocabulary_of((str(folder),), None) is None
    (folder / "args.json").write_text(json.dumps({"vocab_size": largest + 1}))
    assert not found(folder)


def test_log_probs_that_are_all_nan_are_called_so(rollouts):
    for name, said in (("behavior", "missing_log_probs"), ("proximal", "nan_log_probs")):
        harmed = [replace(r, **{name: torch.full((r.size,), torch.nan)}) for r in rollouts]
        (finding,), _ = examine(diagnosed(harmed))
        assert finding.name == said and finding.title.startswith("All log-probs of the ")


def rewarded(means, rollouts, **first):
    made = []
    for i, mean in enumerate(means):
        r = rollouts[i % len(rollouts)]
        rewards = (torch.arange(r.count) < round(mean * r.count)).double()
        made.append(replace(r, rollout_id=i, rewards=rewards, versions=None, newest=None, entropy=None))
    return made


def test_a_reward_that_collapses_is_named_with_what_moved_first(rollouts):
    means = [0.3, 0.4, 0.5, 0.5, 0.6, 0.6, 0.5, 0.0, 0.1, 0.0, 0.0]
    distinct = run(replace(WORLD, rollouts=len(means)))
    (finding,), _ = examine(diagnosed(rewarded(means, distinct)))
    assert finding.name == "reward_collapse" and "at rollout 7" in finding.title
    assert "Neither the log-ratios" in finding.evidence
    sure = [
        replace(r, behavior=0.3 * r.behavior, proximal=0.3 * r.proximal) if r.rollout_id >= 5 else r
        for r in rewarded(means, distinct)
    ]
    named = {f.name: f for f in examine(diagnosed(sure))[0]}
    assert "First moved mean -log-prob of the sampler" in named["reward_collapse"].evidence
    assert "at rollout 5." in named["reward_collapse"].evidence


@pytest.mark.parametrize(
    "means",
    [
        [0.3, 0.4, 0.5, 0.5, 0.6, 0.6, 0.5, 0.0, 0.1, 0.5, 0.6],  # it came back
        [0.5, 0.4, 0.6, 0.5, 0.4, 0.6, 0.3, 0.5, 0.4, 0.5, 0.4],
        [0.1] * 11,
        [0.0] * 11,
    ],
)
def test_a_reward_that_moves_is_no_collapse(means):
    distinct = run(replace(WORLD, rollouts=len(means)))
    findings, _ = examine(diagnosed(rewarded(means, distinct)))
    assert not findings


def test_folders_with_dumps_are_named_where_the_folder_itself_has_none(tmp_path, rollouts, capsys):
    for name in ("a", "b/c"):
        dumps.write_run(tmp_path / name, rollouts[:1])
    assert main(["analyze", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"give {tmp_path / 'a'} or {tmp_path / 'b/c'}, which hold dumps" in said and said.count("\n") == 1


def test_rewards_of_any_size_are_no_traceback(rollouts):
    large = [
        replace(
            r,
            rollout_id=i,
            rewards=torch.full((r.count,), 10.0 ** (108 + 100 * (i % 3)), dtype=torch.float64),
        )
        for i, r in enumerate(rollouts * 4)
    ]
    examine(diagnosed(large))

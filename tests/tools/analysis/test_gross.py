"""Wrong dumps, written to files and read back: each is named, none is silent."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.faults.harms import append_twice, edited, of_other_run
from slime_ext.tools.analysis.detectors import left_out
from slime_ext.tools.analysis.findings import examine
from slime_ext.tools.analysis.readers.flags import flags_of
from slime_ext.tools.analysis.readers.vocabulary import vocabulary_of
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse
from slime_ext.tools.commands.cli import main
from tests.tools.analysis import dumps
from tests.tools.analysis.rollouts import rollout as random_rollout
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


def in_all(**columns):
    """A harm that gives every rollout these columns."""
    return lambda rs: [replace(r, **{name: make(r) for name, make in columns.items()}) for r in rs]


def in_one(number, **columns):
    return lambda rs: [in_all(**columns)([r])[0] if r.rollout_id == number else r for r in rs]


def twice(rs):
    """Of the first rollout, samples 1 and 2 are sample 0 again."""
    first, *others = rs
    order = [0, 0, 0, *range(3, first.count)]
    lists = {name: first_parts(first, name) for name in ("behavior", "proximal", "tokens")}
    joined = {name: torch.cat([parts[i] for i in order]) for name, parts in lists.items()}
    lengths = tuple(first.lengths[i] for i in order)
    plain = {"advantages": None, "entropy": None, "versions": None, "newest": None}
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    return [replace(first, lengths=lengths, mask=mask, **plain, **joined), *others]


def first_parts(rollout, name):
    return getattr(rollout, name).split(rollout.lengths)


def nan(r):
    return torch.full((r.size,), torch.nan)


def no_mask(r):
    return torch.zeros_like(r.mask)


# What is wrong with the rollouts -> how they are harmed, the finding, its severity, and words that it has.
IN_MEMORY = {
    "all masks 0": (in_all(mask=no_mask), "no_response_tokens", "error", "Every token is masked"),
    "masks of a rollout 0": (in_one(1, mask=no_mask), "no_response_tokens", "error", "In 1 rollout"),
    "one column for both": (in_all(proximal=lambda r: r.behavior), "equal_columns", "note", "bitwise equal"),
    "a rollout with one column": (
        in_one(2, proximal=lambda r: r.behavior),
        "equal_columns",
        "warning",
        "In 1 of 3 rollouts",
    ),
    "sampler NaN": (in_all(behavior=nan), "missing_log_probs", "error", "All log-probs of the sampler"),
    "trainer NaN": (in_all(proximal=nan), "nan_log_probs", "error", "All log-probs of the trainer"),
    "probabilities": (in_all(behavior=lambda r: r.behavior.exp()), "positive_log_probs", "error", "above 0"),
    "zeros": (
        in_all(behavior=lambda r: torch.zeros(r.size)),
        "greedy_sampling",
        "error",
        "filled in with 0",
    ),
    "samples twice": (twice, "duplicate_samples", "warning", " 0 of them repeat a sample of an earlier"),
    "a rollout twice": (
        lambda rs: [rs[0], replace(rs[0], rollout_id=1), rs[2]],
        "duplicate_samples",
        "warning",
        " 16 of them repeat a sample of an earlier",
    ),
}


EMPTY = {"log_probs": [], "rollout_log_probs": [], "tokens": [1, 2], "prompt_length": 2, "reward": 0.0}
FULL = EMPTY | {"log_probs": [-1.0], "rollout_log_probs": [-1.1], "tokens": [1, 2, 3]}
MASKED = FULL | {"loss_mask": [0]}


@pytest.mark.parametrize(
    ("lines", "title", "evidence"),
    [
        (
            [EMPTY, EMPTY],
            "Every response is empty, so nothing is trained on and nothing can",
            "no response has",
        ),
        (
            [EMPTY, FULL],
            "In 1 rollout every response is empty, so",
            "In 1 of 2 rollouts no response has a token",
        ),
        (
            [EMPTY, MASKED, FULL],
            "In 2 rollouts every token is masked or every response",
            "or no response has",
        ),
    ],
)
def test_a_rollout_of_empty_responses_is_named(tmp_path, lines, title, evidence):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line | {"rollout_id": i}) + "\n" for i, line in enumerate(lines)))
    finding = found(path)["no_response_tokens"]
    assert finding.severity == "error" and "--rollout-max-response-len" in finding.fix
    assert finding.title.startswith(title) and evidence in finding.evidence
    assert ("sample.loss_mask" in finding.fix) == (MASKED in lines)


@pytest.mark.parametrize("wrong", IN_MEMORY)
def test_a_gross_fault_is_named(rollouts, wrong):
    harm, name, severity, words = IN_MEMORY[wrong]
    (finding,), _ = examine(diagnosed(harm(rollouts)))
    said = f"{finding.title} {finding.evidence} {finding.fix}"
    assert (finding.name, finding.severity) == (name, severity) and words in said, said


@pytest.mark.parametrize(("share", "is_found"), [(0.01, False), (0.4, False), (0.6, True)])
def test_a_rollout_without_a_difference_is_a_copy_where_most_tokens_of_others_differ(
    rollouts, share, is_found
):
    """Engines in bfloat16 that differ at 1% of the tokens of a rollout may differ at none of another."""

    def nudged(r):
        return r.behavior + 0.01 * (torch.arange(r.size) < share * r.size)

    alike = in_one(1, proximal=lambda r: r.behavior)(in_all(proximal=nudged)(rollouts))
    assert ("equal_columns" in {finding.name for finding in examine(diagnosed(alike))[0]}) == is_found


def cut_off(folder):
    path = folder / "train_data" / "1.pt"
    path.write_bytes(path.read_bytes()[:1000])


def retokenised(rollout_id, rows):
    for row in rows:
        row["tokens"][-1] += 1


def another_run(folder):
    return dumps.write_run(folder, run(replace(WORLD, seed=1)))


half_left_out = edited(append_twice, "train_data")
# The same for files.
IN_FILES = {
    "as they are": (lambda folder: None, "", ""),
    "half of the samples left out": (half_left_out, "left_out", "24 of 48 samples"),
    "a file cut off": (cut_off, "left_out", "1 file or part of one"),
    "train dumps of another run": (of_other_run(another_run), "other_run", "48 of 48 samples"),
    "other tokens": (edited(retokenised, "train_data"), "retokenised", "48 samples have different tokens"),
}


@pytest.mark.parametrize("wrong", IN_FILES)
def test_a_gross_fault_of_files_is_named(tmp_path, rollouts, wrong):
    harm, name, words = IN_FILES[wrong]
    folder = dumps.write_run(tmp_path / "run", rollouts)
    harm(folder)
    said = found(folder)
    assert set(said) == ({name} if name else set())
    assert all(words in f"{finding.title} {finding.evidence}" for finding in said.values()), said


@pytest.mark.parametrize(
    ("samples", "files", "is_found"),
    [
        ((0, 100), (0, 30), False),
        ((1, 99), (0, 30), True),
        ((1, 100), (0, 30), False),
        ((40, 960), (0, 30), True),
        ((1, 9), (0, 30), True),
        ((0, 100), (3, 30), True),
        ((0, 100), (2, 30), False),
        ((0, 100), (1, 3), True),
    ],
)
def test_one_sample_in_a_hundred_or_one_file_in_ten_is_much_to_leave_out(samples, files, is_found):
    """(left out, read) samples; (unread, all) rollouts."""
    counted = left_out.Read(left_out=samples[0], samples=samples[1])
    d = SimpleNamespace(of=lambda kind: counted, unread=files[0], timeline=[None] * files[1])
    assert (left_out.look(d) is not None) == is_found


def test_shares_are_of_the_samples_that_were_read(tmp_path, rollouts):
    folder = dumps.write_run(tmp_path, [replace(r, behavior=r.behavior.exp()) for r in rollouts])
    half_left_out(folder)
    said = found(folder)
    assert set(said) == {"left_out", "positive_log_probs"}
    assert said["positive_log_probs"].evidence.endswith("Shares are of the samples that could be read.")


def test_rollouts_that_come_back_in_a_file_are_named(tmp_path, rollouts):
    path = dumps.write_jsonl(tmp_path / "run.jsonl", rollouts)
    lines = path.read_text().splitlines()
    assert not found(path)
    path.write_text("\n".join(lines[::2] + lines[1::2]) + "\n")
    (finding,) = document(path).findings
    assert finding.name == "repeated_rollouts" and finding.rollouts == (0, 1, 2)
    assert "after others" in finding.title
    path.write_text("\n".join(lines) + "\n")
    dumps.write_jsonl(tmp_path / "other.jsonl", rollouts[1:])
    said = found(tmp_path)
    assert "in another file" in said["repeated_rollouts"].title
    assert said["repeated_rollouts"].rollouts == tuple(r.rollout_id for r in rollouts[1:])


def answers(probability, copied, groups=40, size=4):
    """A rollout of prompts with ``size`` answers of one token each, "yes" or one of 50 others; in each group
    in ``copied`` the second is the first again."""
    g = torch.Generator().manual_seed(0)
    count = groups * size
    is_yes = torch.rand(count, generator=g) < probability
    tokens = torch.where(is_yes, 7, torch.randint(100, 150, (count,), generator=g))
    tokens[[size * group + 1 for group in copied]] = tokens[[size * group for group in copied]]
    other = (1 - probability) / 50
    behavior = torch.where(tokens == 7, probability, other).log()
    r = random_rollout(samples=count)
    return replace(
        r,
        lengths=(1,) * count,
        behavior=behavior,
        proximal=behavior + 0.01 * torch.randn(count, generator=g),
        mask=torch.ones(count, dtype=torch.bool),
        tokens=tokens,
        advantages=None,
        prompts=[f"prompt {i // size}" for i in range(count)],
    )


def test_copies_of_short_answers_are_told_from_chance():
    """Chance repeats answers too: of probability 0.6, 90 of the 120 that follow another."""
    for probability in (0.02, 0.3, 0.6, 0.95):
        assert not examine(diagnosed([answers(probability, ())]))[0]
    for probability in (0.02, 0.3):
        (finding,), _ = examine(diagnosed([answers(probability, range(0, 40, 2))]))
        assert (finding.name, finding.or_else) == ("duplicate_samples", ("truncated_sampling",))


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


def test_the_flags_of_a_run_are_found_however_its_folder_is_typed(tmp_path, monkeypatch):
    (tmp_path / "run" / "dump").mkdir(parents=True)
    (tmp_path / "run" / "args.json").write_text(json.dumps({"vocab_size": 7}))
    monkeypatch.chdir(tmp_path / "run" / "dump")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (".", "..", "../dump/", "~/run", "~/run/dump", str(tmp_path / "run")):
        assert flags_of((path,)) == {"vocab_size": 7} and vocabulary_of((path,), None) == 7, path
    assert flags_of(("~nosuchuser/run",)) == {}


def test_a_run_and_its_dump_folder_have_the_same_tokenizer(tmp_path):
    (tmp_path / "run" / "dump" / "tokenizer").mkdir(parents=True)
    file = tmp_path / "run" / "dump" / "tokenizer" / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 6}}}))
    for folder in ("run", "run/dump"):
        assert vocabulary_of((str(tmp_path / folder),), None) == 7, folder
    assert vocabulary_of((str(tmp_path / "run" / "other"),), None) is None  # of another run


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
    assert "The first to move was the mean -log-prob of the sampler" in named["reward_collapse"].evidence
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

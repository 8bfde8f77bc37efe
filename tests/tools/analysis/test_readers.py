"""Dumps written in slime's formats, read back; what cannot be read is named, and nothing in a file runs."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from dataclasses import replace

import pytest
import torch

from slime_ext.errors import DataError
from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers.unpickle import NotPlain, PlainUnpickler
from slime_ext.tools.analysis.records import DumpedRollout
from tests.tools.analysis import dumps
from tests.tools.analysis.in_process import read
from tests.tools.analysis.synthetic import World, run

ROLLOUTS = run(World(rollouts=3, samples=7, length=23))
FIRST = ROLLOUTS[0]


def same(a: DumpedRollout, b: DumpedRollout, *names: str) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("behavior", "proximal", "mask", *names))


def only(paths, **options) -> DumpedRollout:
    (found,) = read(paths, **options)
    assert isinstance(found, DumpedRollout), found
    return found


def reason(paths) -> str:
    (found,) = read(paths)
    assert isinstance(found, Skipped), found
    return str(found)


def test_what_was_written_is_read_in_the_order_of_the_rollout(tmp_path):
    found = list(read([dumps.write_run(tmp_path, ROLLOUTS)]))
    assert [r.rollout_id for r in found] == [0, 1, 2]
    assert all(
        same(a, b, "tokens", "advantages", "rewards", "versions")
        for a, b in zip(found, ROLLOUTS, strict=True)
    )
    assert found[0].positions == FIRST.positions and list(found[0].responses) == list(FIRST.responses)
    assert found[0].prompt_lengths == FIRST.prompt_lengths


def test_engine_rank_and_status_of_a_sample_are_read(tmp_path):
    rollout, train = dumps.write_rollout(tmp_path, FIRST), dumps.write_train(tmp_path, FIRST, ranks=2)
    content = torch.load(rollout)
    labels = [{"engine": "a"}, {"metadata": {"worker_url": "http://b:1", "dp_rank": 0}}, {"dp_rank": 1}]
    labels += [{"metadata": None}, {"metadata": {"engine_id": [1]}}, {"metadata": {"engine_id": 3}}, {}]
    for sample, more in zip(content["samples"], labels, strict=True):
        sample |= more | {"status": "aborted"}
    torch.save(content, rollout)
    found = only([tmp_path])
    assert found.engines == ("a", "http://b:1 dp 0", "dp 1", "", "", "3", "")
    assert found.ranks == (0, 1, 0, 1, 0, 1, 0) and set(found.statuses) == {"aborted"}
    (part, *_) = found.parts(limit=1)
    assert (part.engines, part.ranks, part.statuses) == (("a",), (0,), ("aborted",))

    alone = torch.load(train)
    alone["samples"][2]["truncated"] = 1
    torch.save(alone, train)
    found = only([train])
    assert found.engines is None and found.statuses == ("", "", "truncated", "", "", "", "")


def test_per_rank_files_become_whole_responses(tmp_path):
    layouts = ({}, {"tp": 2}, {"dp": 2}, {"pp": 2}, {"tp": 2, "dp": 2, "pp": 2})
    for cp in (1, 2, 3, 4):
        for number, layout in enumerate(layouts):
            folder = tmp_path / f"{cp}-{number}"
            dumps.write_rollout(folder, FIRST)
            dumps.write_ranks(folder, FIRST, cp=cp, **layout)
            found, dp = only([folder]), layout.get("dp", 1)
            order = [i for d in range(dp) for i in range(d, FIRST.count, dp)]
            for name in ("behavior", "proximal", "advantages"):
                samples = dumps.of_samples(FIRST, name)
                assert torch.equal(getattr(found, name), torch.cat([samples[i] for i in order])), (cp, layout)
            assert found.positions == tuple(order)
            assert list(found.responses) == [FIRST.responses[i] for i in order]


def test_a_missing_context_parallel_rank_is_named(tmp_path):
    dumps.write_ranks(tmp_path, FIRST, cp=3)[1].unlink()
    assert "no context-parallel layout explains these lengths" in reason([tmp_path])


def test_ranks_without_log_probs_are_told_why(tmp_path):
    for path in dumps.write_ranks(tmp_path, FIRST, pp=2)[1:]:
        path.unlink()
    assert "the last pipeline stage" in reason([tmp_path])


class Runs:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_malicious_pickle_runs_nothing(tmp_path):
    for number, is_zip in enumerate([True, False]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, proof = folder / "0.pt", folder / "ran"
        content = {"rollout_id": 0, "samples": [], "more": Runs(proof)}
        torch.save(content, path, _use_new_zipfile_serialization=is_zip)
        said = "system, which is no plain data: not loaded, because loading it could run code"
        assert (said if is_zip else "no torch file") in reason([path])
        assert not proof.exists()
        torch.load(path, weights_only=False)
        assert proof.exists()  # it would have


CALLS = """
    builtins.getattr builtins.eval builtins.exec builtins.__import__ builtins.open builtins.type
    builtins.map __builtin__.getattr operator.attrgetter operator.methodcaller functools.partial
    os.system posix.system torch.load torch.hub.load torch.utils.collect_env.run numpy.load pickle.loads
    copyreg._reconstructor torch._utils._rebuild_from_type_v2 torch._tensor._rebuild_from_type_v2
    torch.float32.__class__
""".split()
ALLOWED = """
    __builtin__.bytes _codecs.encode builtins.bytes collections.OrderedDict
    miles.utils.types.AdapterRef miles.utils.types.RewardSpec
    numpy._core.multiarray._reconstruct numpy._core.multiarray.scalar
    numpy.core.multiarray._reconstruct numpy.core.multiarray.scalar numpy.dtype numpy.ndarray
    slime.data.tensor.DiskTensorRef slime.utils.tensor_store.DiskTensorRef
    straw.protocol.RecordRef straw.protocol.RecordSetRef straw.protocol.SegmentRef straw.tensor.TensorRef
    torch.Size torch._utils._rebuild_parameter torch._utils._rebuild_tensor_v2
    torch._utils._rebuild_tensor_v3 torch.storage.UntypedStorage
    vime.data.tensor.DiskTensorRef vime.utils.tensor_store.DiskTensorRef
""".split()


@pytest.mark.parametrize("path", CALLS)
def test_a_pickle_gets_no_function_that_leads_to_another(path):
    module, _, name = path.rpartition(".")
    with pytest.raises(NotPlain, match=re.escape(path)):
        PlainUnpickler(io.BytesIO(f"c{module}\n{name}\n.".encode())).load()  # looks it up


def test_the_names_that_a_pickle_may_use_are_frozen():
    assert sorted(PlainUnpickler(io.BytesIO(b"")).names) == ALLOWED


def test_broken_files_are_named_and_the_rest_is_read(tmp_path):
    dumps.write_run(tmp_path, ROLLOUTS)
    path = tmp_path / "train_data" / "1.pt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = list(read([tmp_path]))
    assert [type(f) for f in found] == [DumpedRollout, Skipped, DumpedRollout]
    assert str(path) in str(found[1]) and "cut off" in str(found[1])


def test_a_broken_rollout_dump_only_costs_the_text(tmp_path):
    dumps.write_run(tmp_path, [FIRST])
    (tmp_path / "rollout_data" / "0.pt").write_bytes(b"no dump")
    skipped, found = read([tmp_path])
    assert isinstance(skipped, Skipped) and same(found, FIRST) and found.versions is None


def test_other_files_are_named(tmp_path):
    for number, (content, said) in enumerate(
        [
            ({"format_version": 3, "samples": []}, "expected format version 2, got 3"),
            ({"something": 1}, "not a dump of slime"),
            ([1, 2], "expected a mapping, got list"),
            ({"format_version": 2, "samples": []}, "holds no sample"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        torch.save(content, folder / "0.pt")
        assert said in reason([folder])


def test_a_rollout_dump_alone_has_no_log_probs_of_the_trainer(tmp_path):
    dumps.write_rollout(tmp_path, FIRST)
    assert "no log-probs of the trainer" in reason([tmp_path])


def test_samples_that_do_not_fit_are_left_out(tmp_path):
    path = dumps.write_train(tmp_path, FIRST)
    content = torch.load(path, weights_only=True)
    content["samples"][2]["rollout_log_probs"] = torch.zeros(3)
    content["samples"][4]["log_probs"] = None
    content["samples"][5]["rollout_log_probs"] = None
    torch.save(content, path)
    found = only([tmp_path])
    assert found.positions == (0, 1, 3, 5, 6) and found.behavior.isnan().sum() == FIRST.lengths[5]
    assert any("behavior 3, response" in note for note in found.notes) and len(found.notes) == 3


def test_positions_of_samples_that_were_not_trained_on_stay(tmp_path):
    dumps.write_rollout(tmp_path, FIRST)
    path = dumps.write_train(tmp_path, FIRST)
    content = torch.load(path, weights_only=True)
    content["samples"] = content["samples"][3:]
    torch.save(content, path)
    found = only([tmp_path])
    assert found.positions == (3, 4, 5, 6) and list(found.responses) == FIRST.responses[3:]


TRAINED = {  # of a sample in a file that slime 624b824 wrote
    **dict.fromkeys(("data_parallel_rank", "sample_index", "rollout_position", "response_lengths"), int),
    **dict.fromkeys(("total_lengths", "truncated", "rollout_ids"), int),
    **dict.fromkeys(("rewards", "local_raw_reward"), float),
    **dict.fromkeys(("rollout_log_probs", "log_probs", "kl", "advantages", "returns"), torch.float32),
    **{"tokens": torch.int64, "loss_masks": torch.int32, "rollout_mask_sums": torch.float32},
    "source_names": str,
}


def test_the_dumps_of_these_tests_have_the_keys_and_types_of_slimes(tmp_path):
    content = torch.load(dumps.write_train(tmp_path, FIRST), weights_only=True)
    assert set(content) == {"format_version", "rollout_id", "rank", "samples", "dp_shards", "raw_reward"}
    row, places = content["samples"][0], content["dp_shards"][0]
    kinds = {key: v.dtype if isinstance(v, torch.Tensor) else type(v) for key, v in row.items()}
    assert kinds == TRAINED and content["format_version"] == 2
    schedule = {"sample_indices", "partition", "micro_batch_indices", "num_microbatches"}
    assert set(places) == schedule | {"rank", "data_parallel_rank", "global_batch_sizes"}


def test_ages_are_from_the_newest_weights(tmp_path):
    versions = FIRST.versions.clone()
    versions[: FIRST.lengths[0]] = 3
    dumps.write_run(tmp_path, [replace(FIRST, versions=versions + 2)])
    ages = only([tmp_path]).ages
    assert set(ages[: FIRST.lengths[0]].tolist()) == {0.0} and set(ages[FIRST.lengths[0] :].tolist()) == {3.0}


def test_one_weight_version_per_turn(tmp_path):
    mask = FIRST.mask.clone()
    mask[3:6] = False
    versions = FIRST.versions.clone()
    versions[6 : FIRST.lengths[0]] = 1
    dumps.write_run(tmp_path, [replace(FIRST, mask=mask, versions=versions)])
    found = only([tmp_path])
    assert torch.equal(found.versions[mask], versions[mask])


def test_jsonl_is_the_same(tmp_path):
    found = list(read([dumps.write_jsonl(tmp_path / "run.jsonl", ROLLOUTS)]))
    assert len(found) == 3
    assert all(same(a, b, "advantages", "rewards") for a, b in zip(found, ROLLOUTS, strict=True))


def test_lines_that_are_no_samples_are_named(tmp_path):
    good = dumps.write_jsonl(tmp_path / "run.jsonl", [FIRST]).read_text()
    (tmp_path / "run.jsonl").write_text('{"loss": 1}\nnonsense\n[]\n[]\n' + good)
    found = list(read([tmp_path]))
    assert same(found[0], FIRST) and len(found) == 4
    assert [
        "run.jsonl:1" in str(found[1]),
        "run.jsonl:2" in str(found[2]),
        "2 more lines" in str(found[3]),
    ] == [True] * 3


def test_slimes_keys_with_other_values_are_named_and_left_out(tmp_path):
    for number, content in enumerate(
        [
            {"samples": None},
            {"samples": [1]},
            {"format_version": 2},
            {"format_version": 2, "samples": [{"response_lengths": "x"}]},
            {"format_version": 2, "samples": [{"response_lengths": 1, "rollout_position": "x"}]},
            {"rollout_data": None},
            {"rollout_data": {"log_probs": [1.0]}},
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        dumps.write_run(folder, ROLLOUTS)
        (folder / "rollout_data" / "1.pt").unlink()
        torch.save(content, folder / "train_data" / "1.pt")
        found = list(read([folder]))
        said = [str(one) for one in found if isinstance(one, Skipped)]
        assert [r.rollout_id for r in found if isinstance(r, DumpedRollout)] == [0, 2]
        assert "1.pt" in said[0] and "than slime's" in said[0]


def test_none_in_a_list_is_a_missing_log_prob(tmp_path):
    line = {"rollout_log_probs": [-1.0, None], "log_probs": [-1.0, -2.0]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    assert only([tmp_path]).behavior.isnan().tolist() == [False, True]


def test_ranges_of_rollouts(tmp_path):
    dumps.write_run(tmp_path, ROLLOUTS)
    lines = dumps.write_jsonl(tmp_path / "a.jsonl", ROLLOUTS)
    ranges = {"1": [1], "1-2": [1, 2], "2-": [2], "0,2": [0, 2], "-1": [0, 1]}
    for path in (tmp_path, lines):
        found = {wanted: [r.rollout_id for r in read([path], wanted)] for wanted in ranges}
        assert found == ranges


def test_patterns_and_single_files(tmp_path):
    dumps.write_run(tmp_path, ROLLOUTS)
    assert len(list(read([tmp_path / "train_data" / "[01].pt"]))) == 2
    assert same(only([tmp_path / "train_data" / "2.pt"]), ROLLOUTS[2])
    assert len(list(read([tmp_path / "*" / "1.pt"]))) == 1


def test_the_folder_of_a_run_or_its_dumps(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")  # slime-ext train leaves some beside its dump
    for name in ("dump", "dumps"):
        dumps.write_run(tmp_path / name, [FIRST])
        assert same(only([tmp_path]), FIRST) and same(only([tmp_path / name]), FIRST)
        shutil.rmtree(tmp_path / name)


def test_checkpoints_and_evaluations_beside_dumps_are_no_dumps(tmp_path):
    dumps.write_run(tmp_path, [FIRST])
    (tmp_path / "rollout_data" / "0.pt").rename(tmp_path / "rollout_data" / "eval_0.pt")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert same(only([tmp_path]), FIRST)


@pytest.mark.parametrize(
    ("path", "wanted", "said"),
    [
        ("nowhere", None, "got nothing of that name"),
        (".", None, "give the folder of --dump-details"),
        (".", "a-b", "--rollouts: expected numbers and ranges"),
        ("*.pt", None, "got no such file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, path, wanted, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=said):
        list(read([path], wanted))


def test_a_range_outside_the_run_says_what_there_is(tmp_path):
    dumps.write_run(tmp_path, ROLLOUTS)
    with pytest.raises(DataError, match="expected some of 0-2"):
        list(read([tmp_path], "7-9"))

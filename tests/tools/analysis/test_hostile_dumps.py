"""Files that are cut, corrupt or made to break a reader: each is named and left out, and the rest is read."""

from __future__ import annotations

import json
import os
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from slime_ext.errors import DataError
from slime_ext.tools.analysis.readers.find import find
from slime_ext.tools.analysis.readers.flags import flags_of
from slime_ext.tools.analysis.readers.vocabulary import vocabulary_of
from slime_ext.tools.commands import cli
from tests.tools.analysis import dumps
from tests.tools.analysis.in_process import read
from tests.tools.analysis.synthetic import World, run
from tests.tools.analysis.test_readers import only, reason

FIRST = run(World(rollouts=1, samples=7, length=23))[0]
GOOD = {"rollout_log_probs": [-1.0, -1.0], "log_probs": [-1.0, -2.0]}


def analyzed(folder, *words) -> dict:
    """What the command writes of a folder."""
    data, page = folder / "out.json", folder / "out.html"
    assert cli.main(["analyze", *map(str, words or (folder,)), "--json", str(data), "--out", str(page)]) == 0
    assert "</html>" in page.read_text()
    return json.loads(data.read_text())


def write_lines(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_half_an_emoji_is_no_reason_to_lose_a_report(tmp_path):
    half = {"response": "half \ud83d", "prompt": [{"content": "\ud83d"}]}
    found = analyzed(tmp_path, write_lines(tmp_path / "a.jsonl", GOOD | half))
    assert "half ?" in [worst["text"] for worst in found["worst"]]


def test_a_name_that_is_no_utf_8_is_no_reason_to_lose_a_report(tmp_path):
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/r\xe9sultats"))
    folder.mkdir()
    wrong, half = GOOD | {"log_probs": [1.0]}, {"engine": "\ud83d"}
    path = write_lines(folder / os.fsdecode(b"\xe9.jsonl"), GOOD | half, wrong, {})
    config = folder / os.fsdecode(b"\xe8.yaml")
    config.write_text("slime_ext: {preset: token_tis}")
    found = analyzed(tmp_path, path, "--config", config)
    shown = str(path).encode("utf-8", "replace").decode()
    assert (found["name"], found["paths"]) == ("?.jsonl", [shown]) and shown.endswith("/r?sultats/?.jsonl")
    assert found["skipped"][0]["path"] == f"{shown}:3" and found["notes"][0].startswith(f"{shown}: 1 sample")
    assert "?" in [effect["name"] for effect in found["effects"]]


def test_half_an_emoji_in_the_name_of_an_engine_is_no_reason_to_lose_a_report(tmp_path):
    found = only([write_lines(tmp_path / "a.jsonl", GOOD | {"engine": "\ud83d"}, GOOD | {"engine": "b"})])
    assert found.engines == ("?", "b")


def test_log_probs_without_measure_have_no_measure(tmp_path):
    for number, sign in enumerate([-1, 1]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = dumps.write_train(folder, FIRST)
        content = torch.load(path, weights_only=True)
        for sample in content["samples"]:
            sample["log_probs"] = sample["rollout_log_probs"] + sign * 1e37
        torch.save(content, path)
        total = analyzed(folder)["total"]
        assert total["tokens"] and (total["ess_token"] is None) == (sign < 0)


def test_a_rollout_number_without_bounds_is_named(tmp_path):
    for number in (10**305, -(10**400), 10**18):
        path = write_lines(tmp_path / "a.jsonl", GOOD, GOOD | {"rollout_id": number})
        found = analyzed(tmp_path, path)
        assert len(found["timeline"]) == 1 and "at most 18 digits" in found["skipped"][0]["reason"]
        torch.save({"rollout_id": number, "samples": []}, tmp_path / "0.pt")
        assert "at most 18 digits" in reason([tmp_path / "0.pt"])


def test_numbers_that_no_int64_holds_and_a_text_for_a_mapping_stop_no_analysis(tmp_path):
    for number, (odd, count) in enumerate(
        [
            ({"prefix_cache_info": "PrefixCacheInfo(cached_tokens=0)"}, 3),
            ({"group_index": 2**63}, 3),
            ({"group_index": 10**400}, 3),
            ({"rollout_id": 10**17}, 3),
            ({"prompt_length": 2**63}, 2),
        ]
    ):
        lines = (GOOD | {"group_index": 0}, GOOD | {"group_index": 3} | odd, GOOD | {"group_index": 1})
        found = analyzed(tmp_path, write_lines(tmp_path / f"{number}.jsonl", *lines))
        assert found["total"]["sequences"] == count and len(found["skipped"]) == 3 - count
    assert "prompt_length of at most 18 digits" in found["skipped"][0]["reason"]


def test_long_numbers_of_prompts_stay_apart(tmp_path):
    numbers = (2**64 - 5, 3, 2**63, -(2**63), 10**400, 2**64 - 5)
    path = write_lines(tmp_path / "a.jsonl", *(GOOD | {"group_index": n} for n in numbers))
    groups = only([path]).groups
    assert len(set(groups)) == 5 and groups[0] == groups[-1] and groups[1] == 3
    assert torch.tensor(groups).dtype == torch.int64


def rewrite(path: Path, pickled: bytes) -> None:
    """Puts another pickle into a torch file."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else content)


def test_a_corrupt_pickle_is_named(tmp_path):
    for number, pickled in enumerate([b"\x80\x02J\x01", b"\x80\x02K\x01Q.", b"\x80\x02Q.", b"\x80\x02N"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = dumps.write_train(folder, FIRST)
        rewrite(path, pickled)
        assert "is cut off or no torch file" in reason([folder])


def test_a_pipe_in_place_of_the_flags_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "args.json")
    answers = []
    readers = (flags_of, lambda paths: vocabulary_of(paths, None))
    reading = threading.Thread(
        target=lambda: answers.extend(read([tmp_path]) for read in readers), daemon=True
    )
    reading.start()
    reading.join(timeout=10)
    assert answers == [{}, None]


def test_flipped_bytes_never_stop_an_analysis(tmp_path):
    for number, seed in enumerate(range(3)):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = dumps.write_rollout(folder, FIRST)
        content = bytearray(path.read_bytes())
        g = torch.Generator().manual_seed(seed)
        for _ in range(40):
            flipped = bytearray(content)
            for at in torch.randint(len(content), (8,), generator=g).tolist():
                flipped[at] = int(torch.randint(256, (1,), generator=g))
            path.write_bytes(flipped)
            assert len(list(read([folder]))) == 1


def test_a_file_that_cannot_be_opened_is_not_called_cut_off(tmp_path, monkeypatch):
    dumps.write_train(tmp_path, FIRST)

    def denied(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    assert reason([tmp_path]).endswith("0.pt: cannot be read: Permission denied")


def test_a_path_that_cannot_be_one_is_one_line():
    for given in ["~nosuchuser/x", "**a", "a" * 300]:
        with pytest.raises(DataError, match=r"expected .*, got "):
            find([given])


def test_a_link_to_nothing_is_no_dump(tmp_path):
    dumps.write_train(tmp_path, FIRST)
    (tmp_path / "train_data" / "1.pt").symlink_to(tmp_path / "gone")
    assert only([tmp_path / "*" / "*.pt"]).count == FIRST.count


def test_a_range_that_cannot_be_one_is_one_line(tmp_path):
    for number, (wanted, said) in enumerate(
        [("9" * 5000, "numbers and ranges"), ("5-3", "low-high, got '5-3'")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        dumps.write_train(folder, FIRST)
        with pytest.raises(DataError, match=said) as error:
            list(read([tmp_path], wanted))
        assert len(str(error.value)) < 200

"""What is written for a rehearsal, and what watches it, without a host."""

from __future__ import annotations

import asyncio
import json
import os
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
import torch
from pyarrow import parquet

from slime_ext.errors import ConfigError, DataError
from slime_ext_cpu.rehearsal import evidence, observe, prompts, rewards, run
from tests.cpu.rehearsal.launches import launch


def test_a_rehearsal_has_a_model_and_rows_that_load(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said = launch("--apply-chat-template --untie-embeddings-and-output-weights")
    flags, account = run.prepare(said, prompts.all_rows(said), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("2 + 2 = é")["input_ids"]
    assert tokenizer.decode(ids) == "2 + 2 = é"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model(torch.tensor([ids])).logits.std() > 0.3 and model.config.num_hidden_layers == 2
    data = Path(flags[flags.index("--prompt-data") + 1])
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(rows) == prompts.ROWS and set(rows[0]) == {"prompt", "label"}
    assert int(flags[flags.index("--sglang-context-length") + 1]) > len("What is 0 + 0?") + 32
    assert "not on this machine" in dict(account)["data"]


def test_a_tokenizer_that_is_code_is_called_so(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/tokenizer_config.json").write_text('{"auto_map": {}}')
    said = launch(f"--hf-checkpoint {tmp_path}/m")
    _, account = run.prepare(said, prompts.all_rows(said), tmp_path / "out")
    assert "its tokenizer is code, which is not run: a tokenizer of bytes" in account["model"]


def test_files_that_a_script_writes_are_written_for_its_rehearsal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("x: 2")  # of an earlier run
    said = launch("--custom-config-path c.yaml --eval-config b/c.yaml")
    said = replace(said, files={"c.yaml": "x: 1", "b/c.yaml": "x: 3"})
    said = run.with_found_files(said, run.RehearsalHost("miles", tmp_path / "miles", is_own=False))
    said = run.with_written_files(said, tmp_path / "out")
    paths = [Path(said.value(name)) for name in ("--custom-config-path", "--eval-config")]
    assert [path.read_text() for path in paths] == ["x: 1", "x: 3"]
    assert (tmp_path / "c.yaml").read_text() == "x: 2"


def test_the_first_short_rows_of_a_file_are_taken(tmp_path):
    rows = [{"prompt": "x" * (5000 if i % 2 else 5), "label": str(i)} for i in range(200)]
    prompts.write_rows(rows, tmp_path / "d.jsonl")
    said = launch(f"--prompt-data {tmp_path}/d.jsonl@[0:100]")
    found, none = prompts.all_rows(said)
    assert none == []
    assert [row["label"] for row in found] == [str(i) for i in range(0, 100, 2)]
    for flags, line in {
        "--label-key lable": "run.sh:28: --label-key: expected a key of .*did you mean 'label'",
        "--input-key text": "run.sh:28: --input-key: .*got 'text'",
    }.items():
        with pytest.raises(ConfigError, match=line):
            prompts.all_rows(launch(f"--prompt-data {tmp_path}/d.jsonl {flags}"))
    (tmp_path / "d.jsonl").write_text("no json\n")
    with pytest.raises(ConfigError, match=r"run\.sh:27: --prompt-data: expected rows of JSON"):
        prompts.all_rows(said)


PARTS = {  # of 600 rows, every third line blank -> the first and the last that are looked at
    "": (0, 63),
    "@[:5]": (0, 4),
    "@[7:9]": (7, 8),
    "@[590:900]": (590, 599),
    "@[-3:]": (597, 599),
    "@[-9:-7]": (591, 592),
    "@[500:]": (500, 563),
    "@[600:]": None,
    "@[9:7]": None,
    "@[0:9": "expected FILE@[first:last], got ",
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_part_of_a_file_that_a_flag_names_is_taken(tmp_path, suffix):
    rows, file = [{"prompt": "x", "label": i} for i in range(600)], tmp_path / f"d{suffix}"
    if suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" * (1 + row["label"] % 3 // 2) for row in rows))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    for part, wanted in PARTS.items():
        said = launch(f"--prompt-data {file}{part}")
        if isinstance(wanted, tuple):
            labels = [row["label"] for row in prompts.all_rows(said)[0]]
            assert labels == list(range(wanted[0], wanted[1] + 1)), part
        else:
            with pytest.raises(
                ConfigError, match=re.escape(wanted or f"expected rows, got none in {file}{part}")
            ):
                prompts.all_rows(said)


def test_a_relative_file_with_a_part_of_its_rows_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").touch()
    said = launch("--prompt-data d.jsonl@[:5] --eval-prompt-data held absent.jsonl@[:5]")
    said = run.with_found_files(said, run.RehearsalHost("miles", tmp_path / "miles", is_own=False))
    assert said.value("--prompt-data") == f"{tmp_path}/d.jsonl@[:5]"
    assert said.flag("--eval-prompt-data").values[-1] == "absent.jsonl@[:5]"


PLACES = {"FILE": "--prompt-data", "KEY": "--input-key"}
WRONG_ROWS = {
    '[{"prompt": "x"}]': 'FILE: expected an object in each row, got [{"prompt": "x"}] in row 1',
    '{"prompt": "x", "label": 1}\n3': "FILE: expected an object in each row, got 3 in row 2",
    '{"prompt": "x", "label": 1}\n{"label": 1}': "KEY: expected a key of row 2",
    '{"prompt": null, "label": 1}': "KEY: expected text or messages under 'prompt', got null",
    '{"prompt": 5, "label": 1}': "KEY: expected text or messages under 'prompt', got 5 in row 1",
    "": "FILE: expected rows, got none",
}


def test_rows_that_the_host_cannot_read_are_one_line(tmp_path):
    said = launch(f"--prompt-data {tmp_path}/d.jsonl")
    where = {name: f"{said.flag(flag).where}: {flag}" for name, flag in PLACES.items()}
    for text, line in WRONG_ROWS.items():
        (tmp_path / "d.jsonl").write_text(text)
        with pytest.raises(ConfigError) as caught:
            prompts.all_rows(said)
        assert str(caught.value).startswith(where[line.partition(":")[0]] + line[line.index(":") :]), text
    (tmp_path / "d.txt").touch()
    with pytest.raises(ConfigError, match=r"expected a file \.jsonl or \.parquet, got .*d\.txt"):
        prompts.all_rows(launch(f"--prompt-data {tmp_path}/d.txt"))


def test_the_shortest_rows_are_taken_where_all_are_long(tmp_path):
    prompts.write_rows([{"prompt": "x" * (5000 - i), "label": "1"} for i in range(20)], tmp_path / "d.jsonl")
    rows, _ = prompts.all_rows(launch(f"--prompt-data {tmp_path}/d.jsonl"))
    assert [len(row["prompt"]) for row in rows] == [4981 + i for i in range(8)]


def test_rows_of_an_evaluation_have_its_keys(tmp_path):
    prompts.write_rows([{"question": "x", "answer": "1"}], tmp_path / "e.jsonl")
    keys = "--eval-input-key question --eval-label-key answer --eval-prompt-data e"
    said = launch(f"{keys} {tmp_path}/e.jsonl")
    assert prompts.all_rows(said)[1] == [{"question": "x", "answer": "1"}]
    assert prompts.longest_prompt(said, prompts.all_rows(said)[1], Letters()) == 1
    assert set(prompts.all_rows(launch(f"{keys} /absent.jsonl"))[1][0]) == {"question", "answer"}
    with pytest.raises(ConfigError, match=r"run\.sh:28: --eval-label-key: expected a key of row 1 .*answer"):
        prompts.all_rows(
            launch(
                f"--eval-prompt-data e {tmp_path}/e.jsonl --eval-label-key answe --eval-input-key question"
            )
        )


class Letters:
    """A tokenizer of letters, whose chat template takes nothing."""

    chat_template = "x"

    def __call__(self, text):
        return {"input_ids": list(text)}

    def apply_chat_template(self, *args, **kwargs):
        raise LookupError("no role")


def test_a_prompt_that_a_chat_template_refuses_is_one_line():
    said = launch("--apply-chat-template")
    line = r"^run\.sh:\d+: --apply-chat-template: expected prompts .*, got \"x\": LookupError: no role$"
    with pytest.raises(ConfigError, match=line):
        prompts.longest_prompt(said, [{"prompt": "x"}], Letters())


def test_the_host_is_the_one_that_the_script_lies_in(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "wheel_folder", lambda: tmp_path / "wheel")
    for file in ("slime/utils/arguments.py", "train.py", "scripts/run.sh"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    said = launch()
    inside = type(said)(str(tmp_path / "scripts/run.sh"), "train.py", said.flags, {})
    outside = type(said)("/elsewhere/run.sh", "train.py", said.flags, {})
    assert run.host_of(inside, None) == run.RehearsalHost(str(tmp_path), tmp_path / "slime", is_own=True)
    assert run.host_of(outside, str(tmp_path)).package.name == "slime"
    monkeypatch.chdir(tmp_path / "scripts")
    assert run.host_of(outside, "..").package.is_absolute()  # the run has another working directory
    assert Path(run.host_of(outside, "..").name).is_absolute()
    assert run.host_of(outside, None) == run.RehearsalHost("miles", tmp_path / "wheel/miles", is_own=False)
    assert run.host_of(inside, "miles").name == "miles"
    with pytest.raises(ConfigError, match="--host: expected 'miles' or a checkout"):
        run.host_of(outside, str(tmp_path / "scripts"))


class Touches:
    """An object whose unpickling makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_nothing_in_a_dump_is_run(tmp_path):
    folder, ran = tmp_path / "dumps/rollout_data", tmp_path / "ran"
    folder.mkdir(parents=True)
    torch.save({"samples": [{"response_length": 2, "reward": 1.0}]}, folder / "0.pt")
    torch.save({"samples": [Touches(ran)]}, folder / "1.pt")
    seen = evidence.gather(tmp_path, 0, 1.0)
    assert not ran.exists() and list(seen.rollouts) == [0]
    assert re.search(r"1\.pt: holds .* which is no plain data: not loaded", seen.unread[0])


class Manager:
    """As the hosts' RolloutManager treats rewards."""

    def _post_process_rewards(self, samples):
        raw = [sample.get_reward_value(self.args) for sample in samples]
        return raw, [value - sum(raw) / len(raw) for value in raw]


class Sample:
    def __init__(self, reward):
        self.reward = reward

    def get_reward_value(self, args):
        return self.reward[args.reward_key] if args.reward_key else self.reward


def test_equal_rewards_are_spread_and_others_left(monkeypatch):
    monkeypatch.setattr(rewards, "import_module", lambda name: SimpleNamespace(RolloutManager=Manager))
    plain, keyed = Namespace(reward_key=None), Namespace(reward_key="score")
    assert rewards.post_process(plain, [Sample(0.0) for _ in range(4)]) == (
        [0, 1, 0, 1],
        [-0.5, 0.5, -0.5, 0.5],
    )
    assert rewards.post_process(keyed, [Sample({"score": 2}) for _ in range(2)])[0] == [2, 3]
    assert rewards.post_process(plain, [Sample(0.0), Sample(0.25)])[0] == [0, 0.25]
    with pytest.raises(DataError, match=r"sample 1: .* got None: return a number from a\.b"):
        rewards.post_process(Namespace(reward_key=None, custom_rm_path="a.b"), [Sample(0.0), Sample(None)])
    package = {"__path__": [], "_post_process_rewards": lambda args, samples, custom: (custom, len(samples))}
    monkeypatch.setattr(rewards, "import_module", lambda name: SimpleNamespace(**package))
    assert rewards.post_process(plain, [Sample(0.0)]) == (None, 1)
    monkeypatch.setenv(rewards.THEIRS, "theirs.rewards")
    monkeypatch.setattr(
        rewards, "import_module", lambda name: SimpleNamespace(rewards=lambda args, s: (name, len(s)))
    )
    assert rewards.post_process(plain, [Sample(0.0)]) == ("theirs", 1)


def hook(args, *, pg_loss, **kwargs):
    """A hook as slime calls it."""
    return pg_loss, kwargs["loss_masks"], {"ours": pg_loss}


async def reward(args, sample):
    raise KeyError("answer")


def test_calls_and_errors_of_functions_that_flags_name_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv(observe.FOLDER, str(tmp_path))
    module = SimpleNamespace(
        load_function=lambda path: {"a.hook": hook, "a.reward": reward, "a.C": Manager, None: None}[path]
    )
    observe._watch_loaded(module)
    logs = {
        "train_log_probs": [torch.zeros(3)],
        "rollout_log_probs": [torch.tensor([0.5, -1.5, float("nan")])],
    }
    call = module.load_function("a.hook")
    call(None, pg_loss=1.0, loss_masks=[torch.ones(3)], response_lengths=[3], total_lengths=[5], **logs)
    with pytest.raises(KeyError):
        asyncio.run(module.load_function("a.reward")(None, None))
    assert module.load_function("a.C") is Manager and module.load_function(None) is None
    with (tmp_path / f"{os.getpid()}.jsonl").open("a") as file:
        file.write('{"event": "cut o')  # the process was killed
    of_hook, of_reward = observe.read(tmp_path)
    facts = {"tokens": 3, "nonfinite": 1, "pid": os.getpid(), "sequences": 1, "names": ["ours"]}
    assert of_hook == {"event": "function", "path": "a.hook", **facts}
    line = Path(__file__).read_text().splitlines().index('    raise KeyError("answer")') + 1
    assert of_reward["error"] == "KeyError: 'answer'" and of_reward["at"] == f"{__file__}:{line}"


def test_the_environment_has_the_jobs_variables_and_none_of_a_cluster(tmp_path):
    said = launch("--custom-reward-post-process-path a.b")
    job = {"NCCL_DEBUG": "INFO", "MY_KEY": "1", "CUDA_X": "1", "PYTHONPATH": str(tmp_path)}
    said = type(said)(said.script, said.program, said.flags, job)
    found = run.environment_of(said, tmp_path / "out")
    assert found["MY_KEY"] == "1" and not {"NCCL_DEBUG", "CUDA_X"} & set(found)
    assert found[rewards.THEIRS] == "a.b" and str(tmp_path) in found["PYTHONPATH"].split(":")
    assert found[observe.FOLDER] == str(tmp_path / "out/events") and (tmp_path / "out/events").is_dir()


def test_relative_files_are_found_from_where_the_user_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").touch()
    host = run.RehearsalHost("miles", tmp_path, is_own=False)
    found = run.with_found_files(launch("--custom-config-path c.yaml --rm-type math"), host)
    assert (
        found.value("--custom-config-path") == str(tmp_path / "c.yaml") and found.value("--rm-type") == "math"
    )


def test_relative_files_are_found_first_where_the_script_has_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for file in ("c.yaml", "there/c.yaml", "d.yaml"):
        (tmp_path / file).touch()
    said = replace(launch("--custom-config-path c.yaml --eval-config d.yaml"), folder=f"{tmp_path}/there")
    found = run.with_found_files(said, run.RehearsalHost("miles", tmp_path, is_own=False))
    assert found.value("--custom-config-path") == f"{tmp_path}/there/c.yaml"
    assert found.value("--eval-config") == f"{tmp_path}/d.yaml"


def test_the_users_folders_alone_come_before_the_hosts_packages(tmp_path, monkeypatch):
    """The wheel's folder, which has an sglang of its own, and this environment's packages stay behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/theirs:{tmp_path}/absent")
    (tmp_path / "theirs").mkdir()
    own = run.environment_of(launch(), tmp_path / "out")
    assert set(own["PYTHONPATH"].split(":")) == {str(tmp_path), f"{tmp_path}/theirs"}

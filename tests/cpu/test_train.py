"""`slime-ext train`: what it refuses before anything starts, its flags, a run that is cut and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from slime_ext import host
from slime_ext.errors import ConfigError
from slime_ext.tools.commands import cli
from slime_ext.tools.launch.launch import WrittenFlag
from slime_ext_cpu import driver, progress, train
from slime_ext_cpu.processes import MARK
from slime_ext_cpu.rehearsal import preflight
from tests import host_server
from tests.ranks import GROUP, server

ROOT = Path(__file__).parents[2]


def flags_of(**given):
    args = {"task": "letters", "lag": 1, "seed": 3, "num_rollout": 8} | given
    words = list(train._flags(args, train.TASKS[args["task"]], Path("/run"), Path("/model")))
    values = {}
    for word in words:
        if word.startswith("--"):
            values[word] = []
        else:
            values[list(values)[-1]].append(word)
    return values


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_run", lambda *given: pytest.fail("started"))
    monkeypatch.setattr(train.machine, "_free", lambda place: 1 << 40)  # nothing is written: any disk will do
    return tmp_path


def a_run(folder, checkpoint=False):
    folder.mkdir()
    (folder / train.ARGS).write_text(json.dumps(ARGS | {"num_rollout": 60}))
    if checkpoint:
        (folder / train.CHECKPOINT).mkdir()
        (folder / train.CHECKPOINT / train.LATEST).write_text("19")
    return folder


@pytest.mark.parametrize("name", ["token_tis", "score_centering"])
def test_a_presets_file_is_all_that_its_run_needs(name, capsys):
    keys = yaml.safe_load(train._correction(name))
    asks = "custom_generate_function_path" in keys
    assert asks is (name == "score_centering") and keys["use_tis"] is True
    host.init(Namespace(**keys))
    assert f"slime_ext: {name}: " in capsys.readouterr().out


MISTAKES = """
    --correction token_tsi -> expected a known preset, got 'token_tsi'; did you mean 'token_tis'?
    --correction absent.yaml -> --correction absent.yaml: expected a readable file, got No such file
    --correction use_tiss.yaml -> use_tiss.yaml: expected use_tis, got use_tiss
    --correction function.yaml -> expected a function of slime_ext.tis, got 'slime_ext.tis.token_tiss'
    --correction key.yaml -> slime_ext: expected a known key, got 'stepz'; did you mean 'steps'?
    --correction list.yaml -> list.yaml: expected a mapping, got list
    --correction empty.yaml -> empty.yaml: expected a mapping, got NoneType
    --correction broken.yaml -> broken.yaml: expected YAML, got an error at line 1
    --correction latin.yaml -> --correction latin.yaml: expected text in UTF-8
    --host absent -> --host: expected 'miles' or a folder with train.py
    --host= -> --host: expected 'miles' or a folder with train.py, got none
    -- --eps-clip-hihg 0.3 -> -- --eps-clip-hihg: expected a flag of the host
    -- --eps-clip-hihg 0.3 -> did you mean --eps-clip-high?
    --load absent -> --load: expected the folder of a run, got absent
    -- --load run/checkpoint -> -- --load: expected a folder with a checkpoint, got none at run/checkpoint
    --load saved -- --eps-clip-hihg 1 -> -- --eps-clip-hihg: expected a flag of the host
    -- --num-steps-per-rollout -> -- --num-steps-per-rollout: expected a whole number of at least 1, got none
    -- --num-steps-per-rollout two -> --num-steps-per-rollout: expected a whole number of at least 1, got two
    -- --num-steps-per-rollout=0 -> -- --num-steps-per-rollout: expected a whole number of at least 1, got 0
    --load saved -- --num-steps-per-rollout two -> expected a whole number of at least 1, got two
    --load no_json -> no_json/args.json: expected JSON, got an error: Expecting value: line 1 column 1
    --load a_list -> a_list/args.json: task: expected a text, got None: start the run anew
    --load no_lag -> no_lag/args.json: lag: expected a whole number, got 'x': start the run anew
    --load no_task -> no_task/args.json: task: expected a known task, got 'letter'; did you mean 'letters'?
    --load run --lag 2 -> --lag: expected none beside --load, got 2
    --load saved --task sums -> --task: expected none beside --load, got sums
    --load saved --correction token_tis -> --correction: expected none beside --load, got token_tis
    --load saved --lag 1 -> --lag: expected none beside --load, got 1
    --load saved --seed 1 -> --seed: expected none beside --load, got 1
    --load saved --host miles -> --host: expected none beside --load, got miles
    --load run -> --load: expected a checkpoint in run/checkpoint, got none
    --out . -> --out: expected a new or empty folder, got . with files in it: name another folder
    --out run -> --out: expected a new folder, got run
    --out run -> --load run
    --out run/args.json -> run/args.json: expected a folder to write to, got a file
    --out run/args.json/x -> run/args.json/x: expected a folder to write to, got Not a directory
    --out LONG -> LONG: expected a folder to write to, got File name too long: name another folder
    --out /no_such_root/x -> /no_such_root/x: expected a folder below a folder that exists
    --out /LONG -> /LONG: expected a folder below a folder that exists
    --load LONG -> --load: expected the folder of a run, got LONG
"""


CORRECTIONS = {
    "use_tiss": b"use_tiss: true\ncustom_tis_function_path: slime_ext.tis.token_tis",
    "function": b"use_tis: true\ncustom_tis_function_path: slime_ext.tis.token_tiss",
    "key": b"slime_ext: {stepz: []}",
    "list": b"- a",
    "empty": b"",
    "broken": b"use_tis: [",
    "latin": "# \xe4".encode("latin-1"),
}


ARGS = {"task": "letters", "correction": "token_tis", "lag": 1, "seed": 1, "host": "miles", "flags": []}
DAMAGED = {
    "no_json": "",
    "a_list": "[]",
    "no_lag": json.dumps(ARGS | {"num_rollout": 60, "lag": "x"}),
    "no_task": json.dumps(ARGS | {"num_rollout": 60, "task": "letter"}),
}


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_before_anything_starts(elsewhere, line):
    a_run(elsewhere / "run")
    a_run(elsewhere / "saved", checkpoint=True)
    for name, text in DAMAGED.items():
        (a_run(elsewhere / name, checkpoint=True) / train.ARGS).write_text(text)
    for name, text in CORRECTIONS.items():
        (elsewhere / f"{name}.yaml").write_bytes(text)
    (elsewhere / "train.py").touch()  # an empty --host is not the folder that one stands in
    before = set(elsewhere.rglob("*"))
    words, _, said = line.replace("LONG", "x" * 300).partition(" -> ")
    with pytest.raises(ConfigError) as error:
        train.main(words.split())
    assert said in str(error.value) and "\n" not in str(error.value)
    assert set(elsewhere.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lag", "0"], "--lag: expected a whole number of at least 1, got 0"),
        (["--rollouts", "0"], "--rollouts: expected a whole number of at least 1, got 0"),
        (["--task", "other"], "--task: invalid choice: 'other'"),
        (["--seed", "0"], "--seed: expected a whole number of at least 1, got 0"),
        (["--seed", "9" * 20], "--seed: expected a seed of at most 2147483647, got 9999"),
    ],
)
def test_a_number_or_a_task_that_cannot_be_is_refused_by_the_parser(elsewhere, words, said, capsys):
    with pytest.raises(SystemExit):
        train.main(words)
    assert said in capsys.readouterr().err


def test_the_last_number_of_steps_counts_as_the_host_reads_it():
    def steps(words):
        return train._steps(train.TASKS["letters"], words.split())

    last = steps("--num-steps-per-rollout 8 --num-steps-per-rollout=2 --lr 1")
    assert (steps(""), steps("--num-steps-per-rollout 2 --lr=1"), last) == (4, 2, 2)


def test_a_run_says_first_what_it_will_do_and_for_how_long(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(train, "_run", lambda *given: 0)
    monkeypatch.setattr(train.driver.HostRun, "check", lambda run: run.out.mkdir(parents=True))
    monkeypatch.setattr(train.machine, "gflops", lambda threads, in_float32: train.machine.GFLOPS / 2)
    assert train.main(["--task", "letters", "--lag", "20", "--", "--lr", "1e-4"]) == 0
    said = capsys.readouterr().out
    assert "60 rollouts, token_tis, weights pushed every 20 rollouts" in said
    task = train.TASKS["letters"]
    minutes = 2 * (train.START_S + task.rollouts * task.rollout_s) / 60  # of a CPU half as fast
    assert re.search(rf"about {minutes:.0f} min: this CPU .* now at 80 GFLOPS", said)
    assert "runs/letters/log" in said
    args = json.loads(Path("runs/letters", train.ARGS).read_text())
    assert args["flags"] == ["--lr", "1e-4"] and args["lag"] == 20
    assert (args["correction"], args["seed"], args["host"]) == ("token_tis", 1, "miles")
    train.main(["--task", "letters"])
    assert Path("runs/letters-2", train.ARGS).exists()  # the first run stays


def test_a_run_can_go_on_from_another_folder_than_that_of_a_relative_host(elsewhere, monkeypatch):
    monkeypatch.setattr(train, "_run", lambda *given: 0)
    (elsewhere / "slime").mkdir()
    (elsewhere / "slime/train.py").touch()
    train.main("--host slime --out mine".split())
    assert json.loads(Path("mine", train.ARGS).read_text())["host"] == str(elsewhere / "slime")


def test_a_run_goes_on_with_its_own_arguments(elsewhere, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "_run", lambda args, run: seen.append((args, run.out)) or 0)
    monkeypatch.setattr(train.driver.HostRun, "check", lambda run: None)
    a_run(elsewhere / "run", checkpoint=True)
    train.main(["--load", "run", "--rollouts", "80"])
    ((args, out),) = seen
    assert (args["task"], args["num_rollout"], out) == ("letters", 80, Path("run"))
    assert args["flags"][:2] == ["--load", str(elsewhere / "run/checkpoint")]


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        ("--task letters --threads 3", "3"),
        ("--load run --threads 3", "3"),
        ("--task sums", "2"),
        ("--load run", "1"),
    ],
)
def test_threads_are_those_that_are_asked_for_or_the_tasks(elsewhere, monkeypatch, words, threads):
    seen = []
    monkeypatch.setattr(train, "_run", lambda args, run: seen.append(run.environment["OMP_NUM_THREADS"]) or 0)
    monkeypatch.setattr(train.driver.HostRun, "check", lambda run: run.out.mkdir(parents=True, exist_ok=True))
    a_run(elsewhere / "run", checkpoint=True)
    train.main(words.split())
    assert seen == [threads]


def test_a_preset_is_three_keys_and_metrics_only_leaves_the_loss():
    assert train._correction("token_tis").splitlines() == [
        "custom_tis_function_path: slime_ext.tis.token_tis",
        "custom_megatron_init_path: slime_ext.host.init",
        "use_tis: true",
    ]
    assert "get_mismatch_metrics: true" in train._correction("metrics_only")
    assert "use_tis" not in train._correction("metrics_only")


def test_a_correction_of_a_file_is_its_own_text():
    for file in (ROOT / "configs/modes").glob("*.yaml"):
        assert train._correction(str(file)) == file.read_text()


def test_a_file_without_anything_of_ours_is_the_hosts_own_matter(tmp_path):
    (tmp_path / "own.yaml").write_text("use_tis: true\ncustom_tis_function_path: mine.tis.weights\n")
    assert "mine.tis" in train._correction(str(tmp_path / "own.yaml"))


def test_paths_for_the_host_are_whole_as_it_runs_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    words = ["--load", "a/b", "--rm-type", "a", "--eval-prompt-data", "x/y", "/tmp", "--lr", "1"]
    assert train._whole_paths(words) == ["--load", str(tmp_path / "a/b"), *words[2:]]


def test_the_last_rollout_is_evaluated_whatever_their_number():
    for rollouts in range(1, 80):
        assert rollouts % train._eval_every(rollouts, 6) == 0


HELD_OUT = {-1: 0.0, 7: 0.105, 15: 0.205}
ENDS = [  # held-out rewards by rollout, rewards, what the command says
    (HELD_OUT, {}, "eval/heldout 0.000 before training -> 0.205 after rollout 16"),
    ({15: 0.205}, {0: 0.1, 15: 0.2}, "eval/heldout 0.205 after rollout 16 (none before training)"),
    (
        {7: 0.105, 15: 0.205},
        {},
        "eval/heldout 0.105 after rollout 8 -> 0.205 after rollout 16 (none before training)",
    ),
    ({}, {0: 0.1, 3: 0.2, 4: None}, "rollout/raw_reward 0.100 in rollout 1 -> 0.200 in rollout 4"),
    ({}, {}, "no rollout/raw_reward in metrics.jsonl"),
]


@pytest.mark.parametrize(("heldout", "rewards", "said"), ENDS)
def test_the_last_line_says_when_each_reward_was_measured(
    tmp_path, monkeypatch, capsys, heldout, rewards, said
):
    """train_async.py does not evaluate before training; its first evaluation passed for one before it."""
    titles = []
    monkeypatch.setattr(
        "slime_ext.tools.report.run_picture.draw", lambda folders, out, title: titles.append(title)
    )
    rows = [{"rollout": n, progress.HELDOUT: reward} for n, reward in heldout.items()]
    rows += [{"rollout": n, progress.REWARD: reward} for n, reward in rewards.items()]
    (tmp_path / progress.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    train._say_end(tmp_path, {"task": "letters", "correction": "token_tis", "lag": 1}, 9.25)
    assert titles[0].startswith(f"{train.TASKS['letters'].what}\ntoken_tis")
    assert capsys.readouterr().out.splitlines()[0] == (
        f"slime-ext: {said}; 9.2 min; picture: {tmp_path / 'report.png'}"
    )


def test_seed_lag_and_folders_reach_the_host():
    flags = flags_of(lag=8)
    assert flags["--seed"] == flags["--rollout-seed"] == ["3"]
    assert flags["--update-weights-interval"] == ["8"]
    assert flags["--save"] == ["/run/checkpoint"] and flags["--hf-checkpoint"] == ["/model"]
    assert "--update-weights-interval" not in flags_of()


@pytest.mark.parametrize("is_widened", [True, False])
def test_only_a_run_in_float32_changes_the_hosts_padding(monkeypatch, is_widened):
    monkeypatch.setattr(train.bfloat16, "is_widened", lambda: is_widened)
    assert flags_of().get("--data-pad-size-multiplier") == (["1"] if is_widened else None)


@pytest.mark.parametrize("task", train.TASKS)
def test_every_flag_is_one_of_the_hosts(monkeypatch, task):
    """Of miles from its wheel, with its Megatron-LM."""
    monkeypatch.setattr(train.bfloat16, "is_widened", lambda: True)  # which adds flags
    given = [WrittenFlag(name) for name in flags_of(task=task, lag=2)]
    wheel = driver.wheel_folder()
    known = preflight.known_flags(wheel / "miles", wheel / "megatron")
    assert not list(preflight.unknown_flags(given, known))


@pytest.mark.parametrize(("host", "shortens"), [("miles", True), ("slime", False)])
def test_only_miles_from_its_wheel_gets_shortcuts(tmp_path, host, shortens):
    args = {"task": "letters", "host": host, "lag": 1}
    modules = train._host_run(args, tmp_path).environment[driver.INSTALL].split()
    assert ("slime_ext_cpu.shortcuts" in modules, modules[0]) == (shortens, progress.__name__)


def of_run(folder):
    """Ids of the processes whose environment names a folder."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # no process, or gone meanwhile
            found += [process] * (str(folder).encode() in (process / "environ").read_bytes())
    return found


def listening(folder):
    """Addresses, in hexadecimal, at which the processes of a run listen."""
    held = set()
    for process in of_run(folder):
        with contextlib.suppress(OSError):
            held |= {str(link.readlink()) for link in (process / "fd").iterdir()}
    tables = (Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = (line.split() for lines in tables for line in lines)
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held}


def marks(folder):
    """The marks of runs in a folder, which the guard looks for."""
    found = set()
    for process in of_run(folder):
        with contextlib.suppress(OSError):
            words = (process / "environ").read_text(errors="replace").split("\0")
            found |= {word.partition("=")[2] for word in words if word.startswith(f"{MARK}=")}
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
DURESS = {
    "http_proxy": "http://10.255.255.1:3128",
    "all_proxy": "socks5://10.255.255.1:1080",
    "CUDA_VISIBLE_DEVICES": "0",
}


def test_what_to_type_next_is_a_program_that_the_shell_finds(monkeypatch, tmp_path):
    folder = tmp_path / "env/bin"
    folder.mkdir(parents=True)
    script = folder / "slime-ext"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert train._program() == "env/bin/slime-ext"
    monkeypatch.chdir("/usr")
    assert train._program() == str(script)
    monkeypatch.setenv("PATH", str(folder))
    assert train._program() == "slime-ext"
    script.unlink()
    assert train._program() == "slime-ext"


# Rollouts of 32 samples, two optimizer steps each.
SMALL = (
    "--save-interval 1 --rollout-batch-size 4 --n-samples-per-prompt 8 --num-steps-per-rollout 2 "
    "--micro-batch-size 16"
).split()


def in_a_fork(words, environment, screen):
    """Runs `slime-ext` in a process that need not import torch and transformers."""
    os.environ.clear()
    os.environ.update(environment)
    with screen.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.exit(cli.main(words))


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.xdist_group(GROUP)
def test_letters_on_the_real_host_cut_after_a_checkpoint_and_gone_on_with(tmp_path, monkeypatch, capfd):
    """Behind a proxy where nobody answers, with a device of CUDA, in a path with a space.

    SIGTERM ends every process and says how to go on; the run then ends with a row per rollout.
    """
    # test_fork_server.py has a run with a server of its own, which would import for 14 s here.
    for name, value in (DURESS | {"PYTHONPATH": str(ROOT)} | host_server.shared()).items():
        monkeypatch.setenv(name, value)
    out, screen = tmp_path / "a run ü", tmp_path / "screen"
    words = ["train", *"--task letters --rollouts 3 --out".split(), str(out), "--", *SMALL]
    first = server().Process(target=in_a_fork, args=(words, dict(os.environ), screen))
    first.start()
    deadline, looked, seen, marked = time.monotonic() + 400, 0.0, set(), set()
    while not (out / train.CHECKPOINT / train.LATEST).exists() and time.monotonic() < deadline:
        assert first.is_alive(), screen.read_text()
        if time.monotonic() > looked + 1:
            seen, marked = seen | listening(out), marked | marks(out)
            looked = time.monotonic()
        time.sleep(0.05)
    shared = [path for mark in marked for path in Path("/dev/shm").glob(f"*{mark}*")]
    first.terminate()
    first.join(60)
    said = screen.read_text()
    assert said.splitlines()[-1].endswith(f"slime-ext train --load {out}"), said
    assert "0100007F" in seen <= LOOPBACK and not of_run(out)
    assert any(path.name.startswith("sem.") for path in shared) and not any(path.exists() for path in shared)
    assert train.main(["--load", str(out)]) == 0
    assert f"slime-ext analyze {out / train.DUMP}\n" in capfd.readouterr().out
    rows = progress.read(out)
    assert [row["rollout"] for row in rows] == [-1, 0, 1, 2]
    assert 0 < rows[-1]["train/off_policy/k3_kl"] < 1e-3  # the pushes arrived
    assert {"report.png", "tensorboard", "dump", "off_policy.jsonl"} <= {path.name for path in out.rglob("*")}
    assert not of_run(out)

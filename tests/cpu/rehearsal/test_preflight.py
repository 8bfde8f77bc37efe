"""Mistakes that a launch's text shows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.commands import cli
from slime_ext_cpu import driver
from slime_ext_cpu.rehearsal import run
from slime_ext_cpu.rehearsal.main import of_rules
from slime_ext_cpu.rehearsal.preflight import known_flags, mistakes, unknown_to_engine
from tests.cpu.rehearsal.launches import WORDS, launch

PARSER = """
def add(parser):
    parser.add_argument("--custom-rm-path", "--custom-config-path", "--hf-checkpoint", type=str)
    parser.add_argument("--use-tis", action="store_true")
    parser.add_argument("--apply-chat-template", action="store_true")
    reset_arg(parser, "--lr", type=float, default=1e-6)
    parser.add_argument("--num-rollout", "--max-tokens-per-gpu", "--num-steps-per-rollout", type=int)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--either", type=int)
    parser.add_argument("--either", type=str)
    parser.add_argument("--some", nargs="*", type=int)
"""
CONFIG = "class LoggerConfig:\n    log_interval: int = 1\n    log_params_norm: bool = True\n"
PATCH = "+    group.add_argument('--patched', action='store_true',\n"
OTHERS = {word: "" for word in WORDS.split() if word.startswith("--") and word not in PARSER}


@pytest.fixture
def known(tmp_path):
    for file, text in {
        "slime/utils/arguments.py": PARSER,
        "docker/x.patch": PATCH,
        "megatron/training/config/logger.py": CONFIG,
    }.items():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    return known_flags(tmp_path / "slime", tmp_path / "megatron") | OTHERS


def test_flags_are_read_from_the_sources(known):
    assert {"--custom-rm-path", "--log-interval", "--no-log-params-norm", "--patched"} <= known.keys()


def test_a_host_that_is_no_python_is_one_line(known, tmp_path):
    (tmp_path / "slime/utils/arguments.py").write_text("def add(:\n")
    with pytest.raises(ConfigError, match=r"arguments.py: expected Python, got invalid syntax .*line 1"):
        known_flags(tmp_path / "slime", tmp_path / "megatron")


ENGINE_FLAGS = {
    "--sglang-mem-fraction-static 0.8": None,
    "--sglang-mem-frac 0.8": None,  # the beginning of one
    "--sglang-cuda-graph-bs-decode 8": None,
    "--sglang-of-the-host 1": None,
    "--sglang-mem-fraction-statik 0.8": "; did you mean '--sglang-mem-fraction-static'? If",
    "--sglang-cuda-graph-bs 8": "; did you mean '--sglang-cuda-graph-bs-decode'? If",  # of two
    "--sglang-xyzzy 8": ". If",
    "--global-batch-size 8": None,  # none of the engine's
}


def test_a_flag_that_the_engine_here_has_not_is_a_note(tmp_path):
    (tmp_path / "arg_groups/fields").mkdir(parents=True)
    (tmp_path / "server_args.py").write_text("add('--cuda-graph-bs-decode', '--cuda-graph-bs-prefill')")
    (tmp_path / "arg_groups/fields/memory.py").write_text(
        "class Memory:\n    mem_fraction_static: float = 0.9"
    )
    for flags, near in ENGINE_FLAGS.items():
        found = list(unknown_to_engine(launch(flags), {"--sglang-of-the-host": ""}, tmp_path, "0.5.23"))
        start = f"run.sh:27: {flags.split()[0]}: not known to SGLang 0.5.23 on this machine{near}"
        assert (len(found) == 1 and found[0].startswith(start)) if near else not found, (flags, found)
    assert not list(unknown_to_engine(launch(), {}, tmp_path, "0.5.23"))  # its own are there


CASES = [
    ("", None),
    ("--log-interval 3 --no-log-params-norm", None),
    ("--no-use-tis", None),
    (
        "--rm-type '$KIND'",
        "expected a value that the script sets, got '$KIND': pass a variable of your shell",
    ),
    ("--ref-load '$BASE/x'", None),  # replaced
    (
        "--use-ti",
        "--use-ti: the host has no such flag; did you mean --use-tis?",
    ),  # Megatron's allow_abbrev is off
    ("--sglang-anything 1", None),
    ("--sglang-tokenizer-path Qwen2.5-7B", None),
    ("--use-tiss", "run.sh:27: --use-tiss: the host has no such flag; did you mean --use-tis?"),
    ("--quite-other 1", "run.sh:27: --quite-other: the host has no such flag: remove it"),
    ("--global-batch-size 96", "got 96: 64 samples of each rollout would not be trained on"),
    ("--custom-rm-path rewards.score", None),
    ("--custom-rm-path rewards.scor", "rewards.py has no scor; did you mean 'score'?"),
    ("--custom-rm-path reward.score", "no module reward below the launch"),
    ("--custom-config-path absent.yaml", None),  # check says where it was looked for
    (
        "--hf-checkpoint {here}/plain --apply-chat-template",
        "expected a tokenizer with a chat template, got none",
    ),
    ("--hf-checkpoint {here}/chat --apply-chat-template", None),
    ("--hf-checkpoint /absent --apply-chat-template", None),  # nothing to look at
]


def test_each_mistake_is_one_line_and_nothing_else_is_one(known, tmp_path):
    (tmp_path / "rewards.py").write_text("async def score(args, sample): ...\n")
    for name, settings in {"plain": "{}", "chat": '{"chat_template": "x"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
        (tmp_path / name / "tokenizer_config.json").write_text(settings)
    for flags, line in CASES:
        said = launch(flags.format(here=tmp_path))
        found = list(mistakes(said, known, [tmp_path], is_own_host=True))
        assert (len(found), line or "") == (int(line is not None), line or "") and (line or "") in "".join(
            found
        ), flags


VALUES = {
    "--num-rollout 3k": "expected a whole number, got '3k'",
    "--max-tokens-per-gpu 9,216": "expected a whole number, got '9,216'",
    "--rollout-max-response-len 8k": "expected a whole number, got '8k'",
    "--lr 1e--3": "expected a number, got '1e--3'",
    "--lr": "expected a number, got none",
    "--use-tis true": "expected no value, got 'true': remove the value",
    "--rm-type math -lr 1": "expected flags with two dashes after it, got -lr: write --lr",
    "--custom-rm-path rewards.score x": "expected one value, got 'rewards.score x': remove 'x'",
    "--hf-checkpoint": "expected a file or folder, got none",
    "--hf-checkpoint ''": "expected a file or folder, got none",
    "--prompt-data": "expected a file or folder, got none",
    "--num-steps-per-rollout 0": "expected at least 1, got '0'",
    "--global-batch-size 0": "expected at least 1, got '0'",
    "--micro-batch-size 0": "expected at least 1, got '0'",
    "--micro-batch-size '$X'": None,
    "--lr 1 --num-rollout 0 --lr -1": None,
    "--either x": None,
    "--some": None,
    "--some -1 2": None,
}


def test_values_that_the_host_refuses_or_drops_are_mistakes(known, tmp_path):
    (tmp_path / "rewards.py").write_text("async def score(args, sample): ...\n")
    for flags, line in VALUES.items():
        found = list(mistakes(launch(flags), known, [tmp_path], is_own_host=True))
        assert found == ([f"run.sh:27: {flags.split()[0]}: {line}"] if line else []), flags


FAULTS = {
    "tokenizer.json": ("{ nope", "tokenizer.json, which is not JSON"),
    "tokenizer_config.json": ("{}", "no tokenizer.json"),
    "vocab.json": ("version https://git-lfs.github.com/spec/v1", "vocab.json, a pointer of Git LFS"),
    "tokenizer.model": (None, "tokenizer.model, a link to nothing"),
}


def test_a_tokenizer_that_cannot_be_read_is_one_line(known, tmp_path):
    for name, (text, line) in FAULTS.items():
        folder = tmp_path / f"of_{name}"
        (folder / "tokenizer").mkdir(parents=True)  # passed over
        (folder / name).symlink_to("/absent") if text is None else (folder / name).write_text(text)
        found = list(mistakes(launch(f"--hf-checkpoint {folder}"), known, [], is_own_host=True))
        start = f"run.sh:27: --hf-checkpoint: expected a tokenizer in {folder}, got {line}"
        assert len(found) == 1 and found[0].startswith(start), found
    (folder / "tokenizer_config.json").write_text('{"auto_map": {}}')  # code of its own
    assert not list(mistakes(launch(f"--hf-checkpoint {folder}"), known, [], is_own_host=True))


def test_on_another_host_only_misspelt_names_are_mistakes(known):
    found = lambda flags: list(mistakes(launch(flags), known, [], is_own_host=False))  # noqa: E731
    assert not found("--quite-other 1")
    assert found("--use-tiss") == [
        "run.sh:27: --use-tiss: the host has no such flag; did you mean --use-tis? Or name the host of the "
        "script with --host"
    ]


def test_two_mistakes_are_two_lines(known, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "wheel_folder", lambda: tmp_path)
    monkeypatch.setattr(run, "wheel_folder", lambda: tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "run.sh").write_text(
        "python3 train.py --hf-checkpoint x --num-rollout 1 --use-tiss --custom-rm-path no.f"
    )
    status, lines = cli.main(["rehearse", str(tmp_path / "run.sh")]), capsys.readouterr().err.splitlines()
    assert (status, len(lines)) == (1, 2) and all(line.startswith("slime-ext rehearse: ") for line in lines)
    assert "did you mean --use-tis?" in lines[0] and "no module no" in lines[1]


def test_a_launch_without_a_model_is_a_mistake(known):
    bare = replace(launch(), flags=launch().flags[6:8])
    assert "--hf-checkpoint: expected in the launch, got none among its 2 flags" in next(
        mistakes(bare, known, [], is_own_host=True)
    )


RULES = {
    "--use-tis --custom-tis-function-path slime_ext.tis.token_tis --loss-type sft_loss": "--loss-type: expec",
    "--use-tis --custom-tis-function-path slime_ext.tis.token_ti": "did you mean 'token_tis'",
    "--rm-type math": None,
}


def test_the_rules_of_check_hold_for_every_launch():
    for flags, line in RULES.items():
        found = list(of_rules(launch(flags), run.RehearsalHost("miles", Path("miles"), is_own=False)))
        assert (not found) if line is None else line in found[0], (flags, found)


ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = re.compile(
    r"--[a-z-]+-path[ `|]+(slime_ext\.[\w.<>]+)|^ *(\w+_path): (slime_ext\.[\w.]+)", re.MULTILINE
)


def functions_of_the_pages():
    """(flag, function) of every launch form that the pages show."""
    for page in PAGES:
        for match in OURS.finditer(page.read_text()):
            name = match[0].split()[0].strip("`|: ") if match[1] else f"--{match[2].replace('_', '-')}"
            yield name, (match[1] or match[3]).replace("<preset>", "token_tis")


def test_every_function_that_the_pages_show_is_one(known):
    shown = dict.fromkeys(functions_of_the_pages())
    assert len({function for _, function in shown}) >= 6
    for name, function in shown:
        said = launch(f"{name} {function}")
        found = list(mistakes(said, known | {name: ""}, [ROOT], is_own_host=True))
        assert not found, found


def test_a_function_is_looked_for_as_python_defines_names(known, tmp_path):
    (tmp_path / "here.py").write_text(
        "try:\n    from x import a\nexcept ImportError:\n    a = None\nb: int = 1\nc, d = 1, 2\n"
    )
    for name in "abcd":
        assert not list(
            mistakes(launch(f"--custom-rm-path here.{name}"), known, [tmp_path], is_own_host=True)
        )
    wrong = launch("--custom-rm-path slime_ext.host.innit")
    assert "has no innit; did you mean 'init'?" in next(mistakes(wrong, known, [ROOT], is_own_host=True))


def test_a_launch_that_is_not_all_known_is_not_rehearsed_and_sums_of_it_are_not_judged(known):
    why = "run.sh:3: [ -f /x ] is known only where the script runs"
    found = list(mistakes(replace(launch(), unknown={"--rm-type": why}), known, [], is_own_host=True))
    assert len(found) == 1 and found[0].startswith(
        "run.sh:3: [ -f /x ] is known only where the script runs: --rm-type"
    )
    nodes = replace(launch(), unknown={"--actor-num-nodes": why})
    assert not list(mistakes(nodes, known, [], is_own_host=True))
    assert not list(
        mistakes(launch("--rollout-batch-size '$N' --global-batch-size 96"), known, [], is_own_host=True)
    )

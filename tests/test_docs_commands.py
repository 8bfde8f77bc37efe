"""Types every command of README.md, SKILL.md and docs/*.md as it is printed.

A command that takes seconds runs in this process, through its entry point, in a folder with what the pages'
placeholders name (``desk``). ``LEFT`` has the commands that need minutes, a host, a network or a GPU: their
own parsers read them, and ``LEFT`` says what runs them. A new command that fits neither fails, and so does an
entry that no page needs any longer.
"""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement

from benchmarks.faults.cases import FAULTS
from benchmarks.faults.world import write
from slime_ext import load_config, presets
from slime_ext.tools.commands import cli
from slime_ext.tools.convert.places import COMPOSED
from slime_ext_cpu.driver import wheel_folder
from tests import mutations, pages
from tests.pages import DOCS, PAGES, ROOT, SKILL, commands, in_sentences, named, parts, simple

pytestmark = pytest.mark.xdist_group("documents")  # one worker makes the dumps
EVERY = (*PAGES, SKILL)
PARTS = [(path.name, kind, part) for path in EVERY for kind, part in parts(path.read_text())]
SHOWN = list({shown.lines: shown for path in EVERY for shown in commands(path)}.values())
FLAGS = [part.replace("\\\n", "") for _, kind, part in PARTS if kind == "flags"]
FLAGS += [
    code for path in EVERY for code in in_sentences(path.read_text()) if re.match("--.* slime_ext", code)
]
MAPPINGS = [(page, part) for page, kind, part in PARTS if kind == "yaml"]
ADAPTERS = "".join(path.read_text() for path in (ROOT / "slime_ext/adapters").glob("*.py"))

# (what a command begins with, a placeholder in it) -> what is typed in its place.
VALUES = {
    ("slime-ext check", "FILE"): "mine.yaml",
    ("slime-ext convert", "FILE"): "verl.yaml",
    ("slime-ext presets", "FILE"): "out",
    ("slime-ext presets", "NAME"): "token_tis",
    ("slime-ext rehearse", "FLAGS"): "--num-rollout",
    ("slime-ext report", "FILE"): "out",
    ("python -m benchmarks.engines", "PATH"): "python3",
    ("python -m benchmarks.faults", "NAME"): "frozen_sampler",
    ("python -m benchmarks.fidelity", "FILE"): "mine.yaml",
    ("python -m benchmarks.fidelity", "PRESET"): "token_tis",
    ("python -m benchmarks.hook_bits", "FILE"): "out",
    ("python -m verl.trainer.main_ppo", "OVERRIDES"): "OVERRIDES",
    ("python configs/panels/wandb_workspace.py", "ENTITY"): "me",
    ("python configs/panels/wandb_workspace.py", "PROJECT"): "off-policy",
    ("python tests/mutations.py", "NAME"): next(iter(mutations.MUTATIONS)),
}
# Other placeholders are folders that `desk` has. A word with a dot, = or - at either end is none.
FOLDERS = ("CHECKOUT", "DIR", "DUMPS", "ENV", "FOLDER", "RUN", "SKYRL", "SLIME", "VERL")
PLACEHOLDER = re.compile(r"(?<![\w.$-])[A-Z]{2,}(?![\w=-])")
ASSIGNED = re.compile(r"([A-Z_]+)=(.*)", re.S)

LAUNCH = (
    "pkill -9 python\npython3 train.py --rollout-batch-size 32 --n-samples-per-prompt 8 {} --eps-clip 0.2\n"
)
FIRST = 100  # number of the first dumped rollout, because docs/analyze.md reads rollouts 100-200
FAULT = "Fix first: The sampler still has its first weights: "
# Command -> its exit status, and what it prints or writes. All others exit with 0.
EXPECTED = {
    "slime-ext analyze DIR": (0, FAULT),
    "slime-ext analyze /data/dump_details --rollouts 100-200 --out report.html": (0, "6 rollouts"),
    "slime-ext analyze runs/mine --config mine.yaml --out report.html": (0, "<td><b>mine</b>"),
    "slime-ext analyze runs/mine --suggest 0.01": (0, "to reject 0.01 by probability difference"),
    "slime-ext analyze runs/mine --json numbers.json": (0, '"rejected"'),
    "slime-ext analyze runs/mine --fail-on any": (1, FAULT),
    "slime-ext analyze runs/mine --expect exact": (1, "  first: rollout 100, sample 0, token 0"),
    "slime-ext analyze --follow /data/dump_details --alert-exit": (1, "ALERT"),
    "slime-ext analyze --findings": (0, "frozen_sampler (error, "),
    "slime-ext check --rules": (0, "missing_metrics (hint): "),
    "slime-ext analyze DUMPS --expect exact": (1, "by rollout: 100: "),
    "slime-ext analyze DUMPS --fail-on any": (1, FAULT),
    "slime-ext analyze DUMPS --presets geo_rs,skyrl_geo_mask --out report.html": (
        0,
        "<td><b>skyrl_geo_mask</b>",
    ),
    "slime-ext analyze RUN --config tempered.yaml --out page.html": (0, "<td><b>tempered</b>"),
    "slime-ext check run.sh": (0, "--custom-megatron-init-path slime_ext.host.init"),
    "slime-ext check run.sh --host path/to/slime": (0, "--custom-megatron-init-path slime_ext.host.init"),
    "slime-ext check tempered.yaml": (0, "corrections.Tempered(power 0.5) > truncate(high 2)"),
    "python examples/own/corrections.py": (0, "all agree with their definitions\n"),
    "PYTHONPATH=examples/own python -m benchmarks.fidelity token_tis --config examples/own/tempered.yaml": (
        0,
        "\ntempered ",
    ),
}


class Accepted(Exception):
    """Says that the parser of a program took its words."""


def enter(words, request):
    """Runs a program in this process, through its entry point. Returns the exit status."""
    program, first, *rest = words
    try:
        if program == "slime-ext":
            return cli.main([first, *rest])
        if first == "-c":
            exec(rest[0], {})
            return 0
        run, name = (runpy.run_module, rest.pop(0)) if first == "-m" else (runpy.run_path, first)
        request.getfixturevalue("monkeypatch").setattr(sys, "argv", [name, *rest])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* found in sys.modules after import", RuntimeWarning)
            run(name, run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code or 0


def by_argparse(words, request):
    """Fails unless the program's parser takes the words. Nothing runs after it."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args, **kwargs):
        raise Accepted(parse(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(Accepted):
            status = enter(words, request)
            pytest.fail(f"{words}: expected words that the parser takes, got status {status}")


def by_cuda(words, request):
    """Fails unless the program that the script starts takes the words."""
    by_argparse(["python", "-m", "benchmarks.on_cuda", *words[2:]], request)


def by_make(words, _):
    """Fails unless the target exists and the Makefile reads the variables."""
    subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    variables = [match[1] for word in words if (match := ASSIGNED.fullmatch(word))]
    assert all(f"$({name})" in (ROOT / "Makefile").read_text() for name in variables), words


def by_pip(words, _):
    """Fails unless our extra exists, and another package is one that we ask for in these words."""
    asked_for = "".join((ROOT / name).read_text() for name in ("Makefile", "pyproject.toml", "setup.py"))
    extras = {*importlib.metadata.metadata("slime-ext").get_all("Provides-Extra")}
    assert words[1] == "install" and len(words) > 2, words
    for word in words[2:]:
        folder = word.partition("[")[0]
        if Path(folder).is_dir():
            assert Requirement("slime-ext" + word.removeprefix(folder)).extras <= extras, word
        else:
            assert str(Requirement(word)) in asked_for, word


def by_pytest(words, request):
    """Fails unless the files exist, -k picks one of their tests, and -m names a marker."""
    words = words[words.index("pytest") + 1 :]
    options, unknown = request.config._parser.parse_known_and_unknown_args(words)
    files = [Path(name) for name in options.file_or_dir]
    assert files and not unknown and all(file.exists() for file in files), words
    modules = [module for f in files for module in ([f] if f.is_file() else f.rglob("test_*.py"))]
    tests = re.findall(r"^def (test_\w+)", "\n".join(module.read_text() for module in modules), re.M)
    markers = {line.partition(":")[0] for line in request.config.getini("markers")}
    assert all(any(word in test for test in tests) for word in _names(options.keyword)), words
    assert {*_names(options.markexpr)} <= markers, words


def _names(expression):
    return {*re.findall(r"\w+", expression or "")} - {"and", "or", "not"}


def by_git(words, _):
    """Fails unless a patch exists, and a clone has the name by which tests and patches know its release."""
    match words[1:]:
        case ["apply", "-R"] | ["tag", "-a", "vX.Y.Z", "-m", _]:
            pass
        case ["apply", patch]:
            assert Path(patch).is_file(), patch
        case ["clone", "-q", "SLIME" | "MILES" as host, folder]:
            assert folder.startswith(host.lower()) and (ROOT / f"patches/{folder}.patch").is_file(), folder
            Path(folder).mkdir()
        case ["-C", folder, "checkout", "-q", release]:
            assert Path(folder).is_dir() and folder.endswith(f"-{release}"), folder
        case _:
            pytest.fail(f"{words}: expected a command that this test knows")


def by_hydra(words, _):
    """Fails unless our adapter reads the settings, or the command is one that convert prints."""
    if "OVERRIDES" in words:
        assert shlex.join(words) in COMPOSED["verl"]
    else:
        assert words[2].split(".")[0] in ("verl", "skyrl")
        settings_are_ours(words[3:])


def settings_are_ours(words):
    """Fails unless an adapter reads each setting, and each name of ours exists."""
    for key, value in (word.removeprefix("+").split("=") for word in words):
        name = value.removeprefix("slime_ext.")
        assert key in ADAPTERS, key
        if key.endswith("slime_ext"):
            presets.find(value)
        elif name != value:
            assert name in presets.PRESETS or importlib.util.find_spec(value), value


def by_mutations(words, _):
    """Fails unless all names are mutations."""
    assert {*words[2:]} <= mutations.MUTATIONS.keys(), words


def by_panels(words, _):
    """Fails unless the only function of the script takes as many words."""
    body = ast.parse(Path(words[1]).read_text()).body
    (function,) = (node for node in body if isinstance(node, ast.FunctionDef))
    assert len(words[2:]) == len(function.args.args), words


def by_name(words, _):
    """Fails unless the program exists, and there are no more words."""
    *_, name = words
    assert words in (["python", "-m", name], ["bash", name])
    assert importlib.util.find_spec(name) if words[0] == "python" else Path(name).is_file(), words


class Left(NamedTuple):
    """A command that this test does not run.

    Args:
        reads: fails unless the command's program would take the words.
        runs: the file of what runs the command, or the reason why a person has to.
        text: the place in that file; empty beside a reason.
    """

    reads: Callable
    runs: str
    text: str = ""


CI = ".github/workflows/tests.yml"
LEFT = {
    "make install": Left(by_make, CI, "run: make install"),
    "make train": Left(by_make, CI, "run: make train"),
    "make test": Left(by_make, ".ci/run", "make test"),
    "make test-core": Left(by_make, "a part of make test"),
    "make test-fast": Left(by_make, "a part of make test"),
    "make test-gpu": Left(by_make, "benchmarks/on_cuda/__main__.py", '"tests_gpu"'),
    "make rehearse": Left(by_make, "benchmarks/rehearsals.py", "rehearse"),
    "make lint": Left(by_make, CI, "run: ruff check . && ruff format --check ."),
    "make docs": Left(by_make, CI, "run: make docs"),
    "make wheel": Left(by_make, CI, "run: make wheel"),
    "make lock": Left(by_make, "overwrites requirements.lock"),
    "make cuda-wheels": Left(by_make, "downloads wheels"),
    "slime-ext train": Left(by_argparse, "tests/cpu/test_train.py", "def test_letters_on_the_real_host"),
    "slime-ext rehearse": Left(by_argparse, "benchmarks/rehearsals.py", "rehearse"),
    "pip": Left(by_pip, ".ci/wheel", "-m pip --disable-pip-version-check install"),
    "pytest": Left(by_pytest, ".ci/run", "make test"),
    ".venv/bin/python -m pytest": Left(by_pytest, ".ci/run", "make test"),
    "git apply": Left(
        by_git, "tests/downstream/test_patches.py", "def test_a_diff_adds_its_lines_and_comes_off"
    ),
    "git clone": Left(by_git, "downloads hosts"),
    "git -C": Left(by_git, "needs the downloaded hosts"),
    "git tag": Left(by_git, "makes a release"),
    "bash benchmarks/cuda.sh": Left(by_cuda, "tests/benchmarks/test_on_cuda.py", "--dry-run"),
    "bash tests/adapters/real.sh": Left(by_name, "downloads verl, SkyRL and the cookbook"),
    "python -m verl.trainer.main_ppo": Left(
        by_hydra, "tests/adapters/test_real_packages.py", "calculate_log_probs"
    ),
    "python -m skyrl.train.entrypoints.main_base": Left(
        by_hydra,
        "tests/adapters/test_real_packages.py",
        "trainer.override_entrypoint=slime_ext.adapters.skyrl",
    ),
    "python -m slime_ext_cpu.install": Left(by_name, "Makefile", "-m slime_ext_cpu.install"),
    "python -m benchmarks.analyze_scale": Left(by_argparse, "measures half a gigabyte of dumps"),
    "python -m benchmarks.centering": Left(
        by_argparse, "tests/benchmarks/test_centering.py", "def test_the_program_prints_its_table"
    ),
    "python -m benchmarks.engines": Left(
        by_argparse, "tests/benchmarks/test_engines.py", "def test_a_row_says_what_the_engine_did"
    ),
    "python -m benchmarks.engines.healthy": Left(by_argparse, "runs SGLang for minutes"),
    "python -m benchmarks.faults real": Left(by_argparse, "trains for minutes"),
    "python -m benchmarks.faults figures": Left(
        by_argparse, "tests/benchmarks/test_real_faults.py", "def test_figures_are_what_detectors_read"
    ),
    "python -m benchmarks.faults table": Left(
        by_argparse, "tests/benchmarks/test_real_faults.py", "def test_the_table_of_the_page"
    ),
    "python -m benchmarks.faults pictures": Left(
        by_argparse, "tests/benchmarks/test_pictures.py", "def test_the_parts"
    ),
    "python -m benchmarks.fidelity --results": Left(
        by_argparse,
        "tests/benchmarks/test_fidelity_page.py",
        "def test_the_committed_results_are_those_of_this_code",
    ),
    "python -m benchmarks.fidelity --figures": Left(
        by_argparse, "tests/benchmarks/test_fidelity_page.py", "def test_the_figures_are_drawn"
    ),
    "python -m benchmarks.hook_bits": Left(
        by_argparse, "tests/benchmarks/test_hook_bits.py", "hook_bits.record("
    ),
    "python -m benchmarks.speed": Left(
        by_argparse, "tests/benchmarks/test_speed.py", "def test_speed_prints_a_table"
    ),
    "python -m tests.downstream.drift": Left(
        by_argparse, "tests/downstream/test_contract_source.py", "report(host.folder)"
    ),
    "python -m tests.downstream.layouts": Left(
        by_argparse, "tests/downstream/conftest.py", "layouts.measured_on("
    ),
    "python configs/panels/wandb_workspace.py": Left(by_panels, "needs an account of Weights & Biases"),
    "python tests/mutations.py": Left(by_mutations, "runs the tests of each mutation"),
}
# What runs here, beside the words of a shell. Anything else needs an entry in LEFT.
RUN = ("slime-ext", "python -c", "python -m benchmarks.fidelity", "python examples/own/corrections.py")
SHELL = ("cd", "mkdir", "export")


def best(words, prefixes):
    """Returns the longest prefix with which a command begins, or None."""
    return max((p for p in prefixes if words[: len(p.split())] == p.split()), key=len, default=None)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Writes dumps of a sampler that keeps its first weights."""
    world = replace(FAULTS["frozen_sampler"], rollouts=6, first=FIRST, seed=0)
    return write(world, tmp_path_factory.mktemp("dumps"))


@pytest.fixture
def desk(tmp_path, dumps, monkeypatch):
    """Makes the working folder: a checkout, and beside it what placeholders and examples name."""
    for room in ("benchmarks", "configs", "docs", "patches", "pyproject.toml", "setup.py", "tests"):
        (tmp_path / room).symlink_to(ROOT / room)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "examples/own", tmp_path, dirs_exist_ok=True)  # a page types in this folder
    for name in ("DIR", "DUMPS", "RUN/dump", "data/dump_details", "runs/mine", "runs/before", "runs/after"):
        shutil.copytree(dumps, tmp_path / name, copy_function=os.symlink)
    for name in ("CHECKOUT", "FOLDER", "SKYRL", "SLIME/slime", "VERL", "path/to"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ENV").symlink_to(sys.prefix)
    (tmp_path / "CHECKOUT/miles").symlink_to(wheel_folder() / "miles")
    (tmp_path / "CHECKOUT/train.py").touch()
    (tmp_path / "path/to/slime").symlink_to(tmp_path / "CHECKOUT")
    (tmp_path / "path/to/slime_ext").symlink_to(ROOT)
    logged = "".join(f'{{"rollout_id": {r}, "step_id": 0, "off_policy/k3_kl": 0.001}}\n' for r in range(3))
    mine = {
        "use_tis": True,
        "custom_tis_function_path": "slime_ext.tis.correct",
        "slime_ext": {"preset": "token_tis"},
    }
    verl = {"algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}}}
    yamls = {"mine.yaml": mine, "verl.yaml": verl}
    files = {name: yaml.safe_dump(mapping) for name, mapping in yamls.items()}
    files |= {"run.sh": LAUNCH.format(""), "DIR/off_policy.jsonl": logged, "RUN/off_policy.jsonl": logged}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(files["verl.yaml"]))  # what a pipe brings
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "corrections", raising=False)
    yield tmp_path
    sys.modules.pop("corrections", None)


def unrolled(lines):
    """Yields the simple commands of lines. Repeats those of a loop for each of its words."""
    lines = [simple(line) for line in lines]
    while lines:
        line = lines.pop(0)
        if line[0][0] != "for":
            yield from line
            continue
        _, variable, _, *values = line[0]
        body = [words for _ in range(lines.index([["done"]])) for words in lines.pop(0)]
        lines.pop(0)
        for value in values:
            yield from ([word.replace(f"${variable}", value) for word in words] for words in body)


def split(words):
    """Splits words into the variables that they set and the command."""
    end = next(i for i, word in enumerate(words) if not ASSIGNED.fullmatch(word))
    return words[:end], words[end:]


def placeholders(words):
    """Returns the placeholders of a command. ``by_git`` reads those of git, and python -c has code."""
    if words[:1] == ["git"] or words[:2] == ["python", "-c"]:
        return []
    return [
        (best(words, [b for b, n in VALUES if n == name]), name)
        for w in words
        for name in PLACEHOLDER.findall(w)
    ]


def filled(words, desk):
    """Returns the words with values in place of placeholders."""
    values = {name: VALUES[begin, name] for begin, name in placeholders(words) if begin}
    for begin, name in placeholders(words):
        assert begin or (desk / name).exists(), f"{name}: expected one of VALUES or FOLDERS, got neither"
    words = [PLACEHOLDER.sub(lambda match: values.get(match[0], match[0]), word) for word in words]
    places = {"$PWD": str(Path.cwd()), "path/to/": f"{desk}/path/to/", "/data/": f"{desk}/data/"}
    places["'LOGDIR'"] = f"'{desk}/LOGDIR'"  # because a thread of TensorBoard writes when the test has ended
    for place, path in places.items():
        words = [word.replace(place, path) for word in words]
    return words


def type_words(words, desk, request):
    """Types a simple command. Returns its status, or None if it does not run here."""
    variables, words = split(words)
    left, words = best(words, LEFT), filled(words, desk)
    for variable in variables + words[1:] * (words[0] == "export"):
        set_variable(*filled([variable], desk)[0].split("=", 1), words, request)
    if words[0] in SHELL:
        {"cd": os.chdir, "mkdir": os.mkdir, "export": str}[words[0]](words[1])
    elif left:
        LEFT[left].reads(words, request)
    else:
        assert best(words, RUN), f"{shlex.join(words)}: expected an entry in LEFT or RUN, got none: add one"
        return enter(words, request)
    return None


def set_variable(name, value, words, request):
    """Sets a variable that Python, the command or a test reads."""
    if name == "PYTHONPATH":
        sys.path.insert(0, str(Path(value).resolve()))
    elif name not in words:
        texts = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
        assert any(f'environ.get("{name}")' in text for text in texts), name


@pytest.mark.parametrize("shown", SHOWN, ids=str)
def test_a_command_works_as_printed(shown, desk, request, capsys):
    for words in unrolled(shown.lines):
        assert not any(word.startswith("#") for word in words), "an explanation is copied with its command"
        text = shlex.join(words)
        if (status := type_words(words, desk, request)) is not None:
            out, err = capsys.readouterr()
            pairs = pairwise(filled(split(words)[1], desk))
            written = [Path(word) for flag, word in pairs if flag in ("--out", "--json") and word != "-"]
            assert all(file.is_file() for file in written), text
            shown_text = out + "".join(file.read_text() for file in written if file.suffix != ".png")
            expected, says = EXPECTED.get(text, (0, ""))
            assert status == expected and says in shown_text, (text, status, out, err)


def test_every_entry_is_of_a_command_that_a_page_has():
    typed = [words for shown in SHOWN for words in unrolled(shown.lines)]
    bare = [split(words)[1] for words in typed]
    assert {*LEFT} == {best(words, LEFT) for words in bare} - {None}
    assert {*RUN} == {best(words, RUN) for words in bare if not best(words, LEFT)} - {None}
    assert {*EXPECTED} <= {shlex.join(words) for words in typed}
    needed = {pair for words in bare for pair in placeholders(words)}
    needed |= {pair for words in typed for pair in placeholders(split(words)[0])}
    assert needed == {*VALUES} | {(None, name) for name in FOLDERS}


def test_what_runs_a_command_in_our_place_is_there():
    for name, (_, runs, text) in LEFT.items():
        assert not text or text in (ROOT / runs).read_text(), name


def test_the_examples_of_the_reader_run():
    ran = doctest.testmod(pages)
    assert ran.attempted and not ran.failed


def test_the_names_of_commands_are_those_of_slime_ext():
    assert {name for path in EVERY for name in named(path)} <= cli.COMMANDS.keys()


def test_bash_reads_every_block_of_commands():
    for shown in SHOWN:
        subprocess.run(["bash", "-n"], input="\n".join(shown.lines), text=True, check=True)


def test_the_settings_of_other_systems_are_ours():
    settings = [part for _, kind, part in PARTS if kind == "overrides"]
    assert len(settings) == 1  # docs/elsewhere.md
    settings_are_ours(settings[0].split())


@pytest.mark.parametrize("flags", sorted({*FLAGS}))
def test_a_launch_with_flags_of_a_page_is_ok(flags, desk, capsys):
    """On the real miles, whose functions decide some rules. A hook of a user's own is not looked into."""
    (desk / "miles").symlink_to(wheel_folder() / "miles")
    (desk / "train.py").touch()
    (desk / "run.sh").write_text(LAUNCH.format(flags))
    assert cli.main(["check", "run.sh", "--host", ".", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    if "corrections.half_tis" in flags:
        assert (
            checked["status"] == "unused"
            and "replaces corrections.half_tis" in checked["resolved"]["then_comments"]
        )
    else:
        assert checked["status"] == "ok", checked


@pytest.mark.parametrize(
    ("page", "text"), MAPPINGS, ids=[f"{page} {i}" for i, (page, _) in enumerate(MAPPINGS)]
)
def test_the_yaml_of_a_page_is_ok(page, text, desk, capsys):
    """A file passes ``check``, and what is written alone is a part of the key ``slime_ext``."""
    (desk / "file.yaml").write_text(text)
    if "slime_ext" in (mapping := yaml.safe_load(text)):
        assert cli.main(["check", "file.yaml"]) == 0, capsys.readouterr().err
        assert "custom_megatron_init_path" in mapping or list(mapping) == ["slime_ext"]
    else:
        load_config(mapping)
    assert DOCS / page in PAGES


FIELD = re.compile(r"`((?:resolved|error|recommendation)\.\w+)`")


def test_the_fields_that_the_skill_names_are_in_the_output(desk, capsys):
    """On a launch without slime_ext, on one with a misspelt function, and on dumps with a fault."""
    text = SKILL.read_text()
    assert re.fullmatch(r"name: slime-ext\ndescription: .+", text.split("---\n")[1].strip())
    assert cli.main(["check", "run.sh", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["status"] == "unused" and checked["resolved"]["first"] in FLAGS
    Path("run.sh").write_text(LAUNCH.format("--use-tis --custom-tis-function-path slime_ext.tis.token_tiss"))
    assert cli.main(["check", "run.sh", "--json"]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["status"] == "error"
    assert cli.main(["analyze", "DUMPS", "--json", "report.json"]) == 0
    report = json.loads(Path("report.json").read_text())
    assert report["findings"][0]["name"] == "frozen_sampler" and not report["recommendation"]["is_made"]
    known = {
        "resolved": checked["resolved"],
        "error": refused["error"],
        "recommendation": report["recommendation"],
    }
    for name in FIELD.findall(text):
        assert name.split(".")[1] in known[name.split(".")[0]], name
    assert {"findings", "recommendation", "detectors", "skipped", "unread"} <= report.keys()
    assert {"name", "severity", "title", "evidence", "fix", "or_else"} <= report["findings"][0].keys()
    assert {"nothing", "could not look"} <= {detector["state"] for detector in report["detectors"]}

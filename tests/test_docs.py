"""The documents: every formula runs, every key and preset that they name exists, links between them hold."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import yaml

import slime_ext
from benchmarks.faults import __main__ as faults
from slime_ext import load_config, presets, steps, testing
from slime_ext.config.load import KEYS, KNOWN_STEPS
from slime_ext.core.losses import SURROGATES
from slime_ext.core.steps import Step
from slime_ext.host.rules import RULES, Severity
from slime_ext.tools.commands import cli
from slime_ext.tools.convert import CONVERTED
from slime_ext.tools.plain_torch import function_of

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"]
RESULTS = [
    path for room in ("benchmarks", "tests") for path in sorted((DOCS.parent / room).rglob("RESULTS.md"))
]
FIRST, SKILL = DOCS / "token_tis.md", DOCS.parent / "SKILL.md"
CORRECTIONS, CONFIGURATION, CONVERT = (
    DOCS / name for name in ("corrections.md", "configuration.md", "convert.md")
)
# Sections of corrections.md that hold examples.
SECTIONS = (
    "From REINFORCE to decoupled PPO",
    "Levels",
    "Bounds",
    "Rejection",
    "Prefixes, terms, centering",
    "In Python",
    "Where systems disagree",
)


def section(path, title):
    text = path.read_text()
    start = text.index(f"# {title}\n")
    end = text.find("\n## ", start)
    return text[start : end if end > 0 else None]


NATIVE = section(CONFIGURATION, "Native keys")


def test_the_formulas_of_a_section_run():
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    for title in SECTIONS:
        names = {"math": __import__("math")}
        test = parser.get_doctest(section(CORRECTIONS, title), names, title, str(CORRECTIONS), 0)
        assert test.examples and runner.run(test).failed == 0, title


def test_the_first_page_has_the_function_that_the_command_prints_and_its_calls_run():
    page, preset = FIRST.read_text(), presets.find("token_tis")
    text = function_of("token_tis", preset.correction, preset.formula)
    assert text + "\n" in blocks(page), f"the page needs this function:\n{text}"
    test = doctest.DocTestParser().get_doctest(page, {}, "token_tis", str(FIRST), 0)
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_the_example_of_the_readme_runs():
    ran = doctest.testfile(str(DOCS.parent / "README.md"), module_relative=False)
    assert ran.attempted and not ran.failed


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference.md").read_text()
    public = {*slime_ext.FILES, *steps.__all__, *testing.__all__} - {"PREFIX_STEPS", "STEPS", "samples"}
    assert not [name for name in public if not re.search(rf"\b{name}\b", page)]
    for path in re.findall(r"^::: (\S+)$", page, re.M):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_a_version_has_its_date_and_the_newest_is_the_packages():
    text = (DOCS.parent / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.M)
    assert versions[0] == "Unreleased" and all(
        re.fullmatch(r"\d+\.\d+\.\d+ \(20\d\d-\d\d-\d\d\)", v) for v in versions[1:]
    )
    newest, date = versions[1].rstrip(")").split(" (")
    cited = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text())
    assert newest == slime_ext.__version__ == cited["version"] and date == str(cited["date-released"])


COMMAND = re.compile(r"(?:slime-ext|make|python|pip|bash|cd|git|HOSTS=\S+|PYTHONPATH=\S+|\.venv/\S+) .* # ")


def test_a_command_is_copied_without_its_explanation():
    for path in (*PAGES, SKILL):
        explained = [line for b in blocks(path.read_text()) for line in b.splitlines() if COMMAND.match(line)]
        assert not explained, (path, explained)


def test_the_decision_tree_is_five_lines_that_name_what_exists():
    lines = re.findall(r"^\d\. .*$", section(CORRECTIONS, "Start here"), re.M)
    names = {word for line in lines for word in re.findall(r"`([a-z_0-9]+)`", line)}
    assert len(lines) == 5
    assert names - {"mismatch"} <= {*presets.PRESETS, *presets.ALIASES}


def test_every_key_and_step_is_in_the_tables():
    assert all(f"`{name}`" in NATIVE for name in (*KEYS, *KNOWN_STEPS))


def told(field, hint):
    """How a table says a field: the default comes first of words, and in brackets behind a number."""
    words = get_args(hint)
    if isinstance(field.default, str):
        rest = [word for word in words if word != field.default]
        return f"`{field.name}`: {', '.join([field.default, *rest])}"
    number = "" if field.default is None else rf"[^(`]* \({field.default:g}\)"
    return f"`{field.name}`{number}"


def test_every_field_of_a_step_and_surrogate_is_there_with_its_default():
    for name, cls in {**KNOWN_STEPS, **SURROGATES}.items():
        (row,) = re.findall(rf"^\| (?:`\w+`, )?`{name}`(?:, `\w+`)? \| (.*) \|$", NATIVE, re.M)
        hints = get_type_hints(cls)
        missing = [f.name for f in dataclasses.fields(cls) if not re.search(told(f, hints[f.name]), row)]
        assert not missing and set(re.findall(r"`(\w+)`", row)) <= {f.name for f in dataclasses.fields(cls)}


def test_every_field_of_a_system_is_in_its_table():
    names = {
        "nemo_rl": "NeMo-RL",
        "prime_rl": "prime-rl",
        "open_instruct": "open-instruct",
        "ms_swift": "ms-swift",
    }
    for name, (keys, _) in CONVERTED.items():
        title = re.search(rf"^## {names.get(name, name)}$", CONVERT.read_text(), re.M | re.I)
        assert title, name
        own = section(CONVERT, title[0].removeprefix("## "))
        missing = [key for key in keys if not re.search(rf"\b{key}\b", own)]
        assert not missing, (name, missing)


def test_the_yaml_of_the_documents_loads():
    blocks = re.findall(r"\n\n((?:    .*\n)+)", CONFIGURATION.read_text())
    read = [yaml.safe_load("\n".join(line[4:] for line in b.splitlines())) for b in blocks]
    mappings = [mapping for mapping in read if isinstance(mapping, dict)]  # else a command
    assert len(mappings) == 2
    for mapping in mappings:
        load_config(mapping["slime_ext"])
        assert "custom_megatron_init_path" in mapping or list(mapping) == ["slime_ext"]


def test_links_between_files_hold():
    for path in (*PAGES, *RESULTS, SKILL):
        targets = re.findall(r"\]\(([^):]+)\)", path.read_text())
        assert all((path.parent / target.split("#")[0]).exists() for target in targets), path


ROOMS = "tests|tests_gpu|benchmarks|slime_ext|slime_ext_cpu|configs|examples|patches|docs"
OF_SLIME = "examples/train_infer_mismatch_helper"


def test_files_that_a_document_names_are_there():
    for path in PAGES:
        named = set(re.findall(rf"(?<![\w/.])((?:{ROOMS})/[\w/.-]*\w)", path.read_text()))
        ours = [name for name in named if not name.startswith(OF_SLIME)]
        assert all((DOCS.parent / name).exists() for name in ours), path


OURS = ("slime_ext", "slime_ext_cpu", "benchmarks", "tests/downstream")
SCRIPTS = [f for room in OURS for f in (DOCS.parent / room).rglob("*.py")]
SOURCE = "\n".join(f.read_text() for f in SCRIPTS)


def test_flags_that_a_document_names_are_there():
    for path in (*PAGES, SKILL):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", path.read_text()))
        dests = {flag: flag.removeprefix("--").replace("-", "_") for flag in named}
        unknown = [f for f, dest in dests.items() if not re.search(rf'{f}(?![\w-])|"{dest}"', SOURCE)]
        assert not unknown, path


def test_tests_that_a_document_picks_are_there():
    for path in PAGES:
        for file, word in re.findall(r"pytest (?:-\w )*(tests\S*\.py) -k (\w+)", path.read_text()):
            assert re.search(rf"def test_\w*{word}", (DOCS.parent / file).read_text()), path


def with_examples():
    rooms = ("slime_ext", "slime_ext_cpu", "benchmarks/fidelity")
    files = sorted(f for room in rooms for f in (DOCS.parent / room).rglob("*.py"))
    return [
        ".".join(f.relative_to(DOCS.parent).with_suffix("").parts) for f in files if ">>>" in f.read_text()
    ]


def test_the_examples_of_every_module_run():
    for name in with_examples():
        found = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
        assert found.attempted and not found.failed, name


def blocks(text):
    """What is indented as code."""
    return [
        "\n".join(line[4:] for line in b.splitlines()) for b in re.findall(r"\n\n((?:(?:    .*)?\n)+)", text)
    ]


def test_commands_that_a_document_names_are_there():
    targets = set(re.findall(r"^([a-z-]+):", (DOCS.parent / "Makefile").read_text(), re.M))
    for path in (*PAGES, *RESULTS, SKILL):
        text = path.read_text()
        code = "\n".join([*blocks(text), *re.findall(r"`([^`\n]+)`", text)])
        assert set(re.findall(r"(?:^|/| )slime-ext ([a-z]+)", code)) <= cli.COMMANDS.keys(), path
        assert set(re.findall(r"^make ((?!-)[a-z-]+)", code, re.M)) <= targets, path
        for name in set(re.findall(r"python -m ((?:slime_ext|benchmarks|tests)[\w.]*)", code)):
            assert importlib.util.find_spec(name), (path, name)


def test_every_rule_of_a_launch_is_in_the_table_with_its_severity_and_docstring():
    """Those that refuse first; within a severity in the order in which they are judged."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", (DOCS / "rules.md").read_text(), re.M)
    rules = sorted(RULES.values(), key=lambda rule: [*Severity].index(rule.severity))
    said = [(r.name, r.severity.name.lower(), r.judge.__doc__.replace("``", "`")) for r in rules]
    assert rows == said


def test_every_page_is_on_the_site():
    on_site = set(re.findall(r": (\w+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.M))
    assert on_site == {path.name for path in DOCS.glob("*.md")} | {"index.md"}


def test_the_page_on_corrections_of_ones_own_runs():
    python = [
        b for b in blocks((DOCS / "your_own_correction.md").read_text()) if b.startswith(("from ", "import "))
    ]
    names = {"__name__": __name__}
    exec("\n\n".join(python), names)  # its last lines hold step and hook against their definitions
    assert len(python) == 4 and issubclass(names["Tempered"], Step)


def test_the_site_has_the_readme_first_and_its_links_hold(tmp_path):
    subprocess.run([sys.executable, str(DOCS / "site.py"), str(tmp_path)], check=True)
    pages = sorted(tmp_path.glob("*.md"))
    assert tmp_path / "index.md" in pages and len(pages) == len(PAGES)
    for path in pages:
        targets = re.findall(r"\]\(([^):]+)\)", path.read_text())
        assert all((tmp_path / target.split("#")[0]).exists() for target in targets), path
        assert ">>> " not in re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S), path
        assert not re.search(r"\[\w+\.md\]", path.read_text()), path  # a link shows its page's title


LAUNCH = (
    "pkill -9 python\npython3 train.py --rollout-batch-size 32 --n-samples-per-prompt 8 {} --eps-clip 0.2\n"
)
FIELD = re.compile(r"`((?:resolved|error|recommendation)\.\w+)`")


def test_the_commands_of_the_skill_run_and_print_the_fields_that_it_names(tmp_path, monkeypatch, capsys):
    """Each runs once, on a launch without slime_ext and on dumps of a sampler that keeps its weights."""
    monkeypatch.chdir(tmp_path)
    text = SKILL.read_text()
    assert re.fullmatch(r"name: slime-ext\ndescription: .+", text.split("---\n")[1].strip())
    Path("run.sh").write_text(LAUNCH.format(""))
    faults.toy(tmp_path, ["frozen_sampler"], 0)
    Path("frozen_sampler_0").rename("DUMPS")
    commands = [
        line.split()[1:] for b in blocks(text) for line in b.splitlines() if line.startswith("slime-ext ")
    ]
    assert ["rehearse", "run.sh"] in commands  # needs a host: tests/cpu runs it
    status, shown = {}, {}
    for words in commands:
        if words[0] != "rehearse":
            status[" ".join(words)] = cli.main(words)
            shown[words[0]] = capsys.readouterr().out
    assert list(status.values()) == [0, 0, 1, 0]
    checked, report = json.loads(shown["check"]), json.loads(Path("report.json").read_text())
    assert checked["status"] == "unused" and checked["resolved"]["first"].split("\n")[0] in text
    Path("run.sh").write_text(LAUNCH.format(checked["resolved"]["first"].split("\n")[0]))
    assert cli.main(commands[0]) == 0 and json.loads(capsys.readouterr().out)["status"] == "ok"
    Path("run.sh").write_text(LAUNCH.format("--use-tis --custom-tis-function-path slime_ext.tis.token_tiss"))
    assert cli.main(commands[0]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["status"] == "error"
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

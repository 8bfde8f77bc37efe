"""The documents: every formula runs, every key and preset that they name exists, links between them hold."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import re
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
import yaml

import slime_ext
from slime_ext import presets, steps, testing
from slime_ext.config.load import KEYS, KNOWN_STEPS
from slime_ext.core.losses import SURROGATES
from slime_ext.core.steps import Step
from slime_ext.rules.judge import RULES
from slime_ext.rules.rule import Severity
from slime_ext.tools.commands import cli
from slime_ext.tools.convert import CONVERTED
from slime_ext.tools.plain_torch import function_of
from tests.pages import DOCS, PAGES, ROOT, SKILL, blocks, sessions

RESULTS = [path for room in ("benchmarks", "tests") for path in sorted((ROOT / room).rglob("RESULTS.md"))]
FIRST = DOCS / "token_tis.md"
CORRECTIONS, CONFIGURATION, CONVERT = (
    DOCS / name for name in ("corrections.md", "configuration.md", "convert.md")
)
# Sections of corrections.md that hold examples.
SECTIONS = (
    "Levels",
    "Bounds",
    "Rejection",
    "Prefixes, terms, centering",
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
        test = parser.get_doctest(sessions(section(CORRECTIONS, title)), names, title, str(CORRECTIONS), 0)
        assert test.examples and runner.run(test).failed == 0, title


def test_the_first_page_has_the_function_that_the_command_prints_and_its_calls_run():
    page, preset = FIRST.read_text(), presets.find("token_tis")
    text = function_of("token_tis", preset.correction, preset.formula)
    assert text in blocks(page), f"the page needs this function:\n{text}"
    test = doctest.DocTestParser().get_doctest(sessions(page), {}, "token_tis", str(FIRST), 0)
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_the_readme_is_short_and_has_both_lines_for_a_new_user():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 650
    assert "make train\nmake test" in blocks(text)


def test_the_example_of_the_readme_runs():
    text = sessions((ROOT / "README.md").read_text())
    test = doctest.DocTestParser().get_doctest(text, {}, "README", "README.md", 0)
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference.md").read_text()
    public = {*slime_ext.FILES, *steps.__all__, *testing.__all__} - {"PREFIX_STEPS", "STEPS", "samples"}
    assert not [name for name in public if not re.search(rf"\b{name}\b", page)]
    for path in re.findall(r"^<!-- ::: (\S+)$", page, re.M):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path


def test_a_version_has_its_date_and_the_newest_is_the_packages():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.M)
    assert versions[0] == "Unreleased" and all(
        re.fullmatch(r"\d+\.\d+\.\d+ \(20\d\d-\d\d-\d\d\)", v) for v in versions[1:]
    )
    newest, date = versions[1].rstrip(")").split(" (")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert newest == slime_ext.__version__ == cited["version"] and date == str(cited["date-released"])


def test_the_start_of_the_corrections_names_what_exists():
    names = {*re.findall(r"`([a-z_0-9]+)`", section(CORRECTIONS, "Start here"))}
    assert {"importance_sampling", "ppo_is_bypass"} <= names <= {*presets.PRESETS, *presets.ALIASES}


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
    for name, (_, keys, _, *_) in CONVERTED.items():
        heading = name.replace("ms_swift", "ms-swift")
        title = re.search(rf"^## {heading}$", CONVERT.read_text(), re.M | re.I)
        assert title, name
        own = section(CONVERT, title[0].removeprefix("## "))
        missing = [key for key in keys if not re.search(rf"\b{key}\b", own)]
        assert not missing, (name, missing)


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
        assert all((ROOT / name).exists() for name in ours), path


OURS = ("slime_ext", "slime_ext_cpu", "benchmarks", "tests/downstream")
SCRIPTS = [f for room in OURS for f in (ROOT / room).rglob("*.py")]
SOURCE = "\n".join(f.read_text() for f in SCRIPTS)


def test_flags_that_a_document_names_are_there():
    for path in (*PAGES, SKILL):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", path.read_text()))
        dests = {flag: flag.removeprefix("--").replace("-", "_") for flag in named}
        unknown = [f for f, dest in dests.items() if not re.search(rf'{f}(?![\w-])|"{dest}"', SOURCE)]
        assert not unknown, path


def with_examples():
    rooms = ("slime_ext", "slime_ext_cpu", "benchmarks/fidelity")
    files = sorted(f for room in rooms for f in (ROOT / room).rglob("*.py"))
    return [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files if ">>>" in f.read_text()]


def test_the_examples_of_every_module_run():
    for name in with_examples():
        found = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
        assert found.attempted and not found.failed, name


def test_commands_that_results_name_are_there():
    """tests/test_docs_commands.py types those of the other pages."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in RESULTS:
        text = path.read_text()
        code = "\n".join([*blocks(text), *re.findall(r"`([^`\n]+)`", text)])
        assert set(re.findall(r"(?:^|/| )slime-ext ([a-z]+)", code)) <= cli.COMMANDS.keys(), path
        assert set(re.findall(r"^make ((?!-)[a-z-]+)", code, re.M)) <= targets, path
        for name in set(re.findall(r"python -m ((?:slime_ext|benchmarks|tests)[\w.]*)", code)):
            assert importlib.util.find_spec(name), (path, name)


def test_every_rule_of_a_launch_is_listed_with_its_severity_and_docstring(capsys):
    """Those that refuse first; within a severity in the order in which they are judged."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", "--rules"])
    rules = sorted(RULES.values(), key=lambda rule: [*Severity].index(rule.severity))
    lines = [f"{r.name} ({r.severity.name.lower()}): {r.judge.__doc__}".replace("``", "") for r in rules]
    assert not ended.value.code and capsys.readouterr().out.splitlines() == lines


def test_every_page_is_on_the_site():
    on_site = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
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
        assert not re.search(r"\[\w+\.md\]", path.read_text()), path  # a link shows its page's title


def test_page_and_preset_say_the_same_of_the_proximal_forward_pass():
    """`_skips_proximal` of rules/of_losses.py reads flags alone, and no correction."""
    said = "does not save the proximal forward pass: the host's flags alone decide whether it runs"
    risk = yaml.safe_load((ROOT / "configs/presets.yaml").read_text())["ppo_is_bypass"]["risk"]
    assert all(said in " ".join(text.split()) for text in (risk, CORRECTIONS.read_text()))

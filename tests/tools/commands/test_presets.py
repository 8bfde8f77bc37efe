"""``presets``: the table on terminals of any width, and each preset as a file and as plain torch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from slime_ext import load_config, presets
from slime_ext.hosts.estimators import ESTIMATORS
from slime_ext.tools import decision
from slime_ext.tools.commands import cli, preset_list
from slime_ext.tools.commands.presets import KINDS
from slime_ext.tools.plain_torch import function_of
from tests.tools.test_plain_torch import COUPLED


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_every_preset_is_there_at_any_width_and_takes_two_lines_at_80(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["presets"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width and "…" not in out
    listed = re.split(r"\n(?=\S|  \S)", out.rstrip())
    words = [line.split() for line in listed if line.startswith("  ")]
    assert [name.rstrip(":") for name, *_ in words] == [
        name for of in preset_list.groups().values() for name in of
    ]
    assert sorted(name.rstrip(":") for name, *_ in words) == sorted(presets.PRESETS)
    assert all(f"{alias}" in out for alias in presets.ALIASES)
    assert all(" ".join(each).endswith(preset_list.brief_use(each[0].rstrip(":"))) for each in words)
    if width >= 80:
        assert max(text.count("\n") for text in listed) <= 1
    assert out.index("metrics_only") < out.index("token_tis") < out.index("cispo") < out.index("icepop")


@pytest.mark.parametrize("words", [[], ["--for", "moe"]], ids=["all", "of a kind"])
def test_listing_presets_does_not_import_torch(words):
    program = f"import sys; from slime_ext.tools.commands import cli; cli.main({['presets', *words]})"
    program += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_the_list_has_every_preset_and_alias():
    assert {*preset_list.advice()} == {*presets.PRESETS}
    assert set(presets.ALIASES.values()) <= {*presets.PRESETS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_run_has_its_presets_and_its_rows_of_the_decision_table(kind, capsys):
    assert cli.main(["presets", "--for", kind]) == 0
    table, *paragraphs = capsys.readouterr().out.split("\n\n")
    rows = {line.split()[0].rstrip(":") for line in table.splitlines() if re.match(r"  \S", line)}
    assert rows == {name for name, entry in preset_list.advice().items() if kind in entry.get("for", ())}
    wanted = [f"{row.run}: {row.advice}.".replace("`", "") for row in KINDS[kind]]
    assert [" ".join(paragraph.split()) for paragraph in paragraphs] == wanted


def test_every_row_of_the_decision_table_has_a_kind_of_run():
    assert {row for rows in KINDS.values() for row in rows} == {*decision.TABLE}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--for", "asnyc"], "--for: expected a known kind of run, got 'asnyc'; did you mean 'async'?"),
        (["icepop", "--for", "moe"], "--for moe: expected no NAME beside it, got icepop: leave out one"),
        (["--out", "x.yaml"], "--out: expected the NAME of a preset, got none: type "),
        (["token_tsi"], "got 'token_tsi'; did you mean 'token_tis'? (or token_is, skyrl_token_tis; "),
        (["zzz"], "preset: expected a known preset, got 'zzz' (slime-ext presets lists all)"),
    ],
)
def test_what_cannot_be_printed_is_one_line(words, line, capsys):
    assert cli.main(["presets", *words]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_preset_is_a_file_that_check_accepts_and_that_is_its_correction(name, capsys, tmp_path):
    path = tmp_path / "file.yaml"
    assert cli.main(["presets", name, "--out", str(path)]) == 0 and not capsys.readouterr().out
    assert cli.main(["presets", name]) == 0 and capsys.readouterr().out.startswith(path.read_text() + "\n# ")
    assert path.read_text().startswith("# Flags: --")
    flags, canonical, entry = yaml.safe_load(path.read_text()), presets.ALIASES.get(name), presets.find(name)
    assert load_config(flags["slime_ext"]) == entry.correction
    said = " ".join(path.read_text().replace("\n#  ", "").split())
    assert all(f"# {word}: " in said for word in ("Use", "Risk", "Needs", "Source", "Flags"))
    assert f": {entry.formula} #" in said and (f"# {name} is another name of {canonical}" in said) is bool(
        canonical
    )
    assert cli.main(["check", str(path)]) == 0 and "note" not in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in presets.NAMES if name not in COUPLED])
def test_a_preset_is_a_function_in_plain_torch(name, capsys, tmp_path):
    path = tmp_path / f"{name}.py"
    assert cli.main(["presets", name, "--out", str(path)]) == 0 and not capsys.readouterr().out
    preset = presets.find(name)
    assert path.read_text() == function_of(name, preset.correction, preset.formula) + "\n"
    assert cli.main(["presets", name]) == 0
    shown = capsys.readouterr().out
    assert shown[shown.index("import torch") :] == path.read_text()
    assert f"(--out {name}.py writes it)" in shown and max(map(len, path.read_text().splitlines())) <= 110


@pytest.mark.parametrize("name", COUPLED)
def test_a_preset_of_the_whole_step_names_the_step_and_its_code_instead(name, capsys, tmp_path):
    assert cli.main(["presets", name]) == 0
    shown = " ".join(capsys.readouterr().out.replace("\n#  ", "").split())
    why_not = f"{COUPLED[name]}, which needs one number of the whole optimizer step: read "
    assert (
        f"# Cannot be written in plain torch for one response: {why_not}" in shown
        and "import torch" not in shown
    )
    assert cli.main(["presets", name, "--out", str(tmp_path / "it.py")]) == 2
    assert why_not in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_one_line(capsys, tmp_path):
    assert cli.main(["presets", "geo_rs", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("expected a file to write, got Is a directory\n")


@pytest.mark.parametrize("name", sorted({*ESTIMATORS} - {*presets.NAMES}))
def test_an_estimator_of_the_host_is_no_misspelt_correction(capsys, name):
    assert cli.main(["presets", name]) == 2
    err = capsys.readouterr().err
    assert f"type --advantage-estimator {name}, and a correction beside it" in err and "did you" not in err


def test_a_file_with_other_content_is_not_replaced(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("use_tis: true\n")
    assert cli.main(["presets", "geo_rs", "--out", str(path)]) == 2
    assert "expected a new file, got one with other content: choose another" in capsys.readouterr().err
    assert path.read_text() == "use_tis: true\n"
    path.unlink()
    assert [cli.main(["presets", "geo_rs", "--out", str(path)]) for _ in range(2)] == [0, 0]

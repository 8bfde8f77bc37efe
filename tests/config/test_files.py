"""YAML files: one reader behind every command, and one line for what is none."""

from __future__ import annotations

import pytest
import yaml

from slime_ext.config import files
from slime_ext.config.files import located, read_yaml
from slime_ext.errors import ConfigError
from slime_ext.tools.commands import cli

NO_VALUE = "expected YAML, got a value that does not fit its type: "


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\na: 2", "expected each key once, got 'a' twice: remove one (mapping at line 1)"),
        ("a:\n  b: 1\n  b: 2", "expected each key once, got 'b' twice: remove one (mapping at line 2)"),
        ("{0: 1, 0: 2}", "expected each key once, got '0' twice"),
        ("a: [", "expected YAML, got an error at line 1"),
        ("a: 2024-13-45", NO_VALUE + "month must be in 1..12"),
        ("a: 0b_", NO_VALUE + "invalid literal"),
        ("a: !!int abc", NO_VALUE + "invalid literal"),
        ("a: !!int ''", NO_VALUE),
        ("a: !!float abc", NO_VALUE + "could not convert"),
        ("a: !!bool abc", NO_VALUE + "'abc'"),
        ("a: !!timestamp abc", NO_VALUE),
        ("a: " + "9" * 5000, NO_VALUE + "Exceeds the limit"),
        ("[" * 1000, "expected YAML, got brackets that are nested too deep"),
        ("#" * 1_000_001, "expected at most 1000000 characters, got 1000001: name a configuration"),
    ],
    ids=lambda value: value[:30],
)
def test_what_cannot_be_read_is_one_line_with_the_file(tmp_path, text, line):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(str(path))
    assert str(caught.value).startswith(f"{path}: ") and line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{a: 1, b: {a: 1}}", {"a": 1, "b": {"a": 1}}),
        ("x: &x {a: 1}\ny: {<<: *x, a: 2}", {"x": {"a": 1}, "y": {"a": 2}}),
        ("a: &a [1, 2]\nb: [*a, *a]", {"a": [1, 2], "b": [[1, 2], [1, 2]]}),
        ('{"a": [1]}', {"a": [1]}),
        ("", None),
    ],
)
def test_what_can_be_read(tmp_path, text, found):
    (tmp_path / "c.yaml").write_text(text)
    assert read_yaml(str(tmp_path / "c.yaml")) == found


def test_json_is_read_as_json_where_slime_does_not_read_it(tmp_path):
    """slime reads the file of --custom-config-path as YAML, which refuses tabs."""
    path = tmp_path / "c.json"
    path.write_text('\ufeff{\n\t"a": {\n\t\t"b": [1, null, true, -1.5e-4, NaN, "x\\ty"]\n\t}\n}')
    assert read_yaml(str(path), by_suffix=True) == {"a": {"b": [1, None, True, -1.5e-4, "NaN", "x\ty"]}}
    with pytest.raises(ConfigError, match="expected YAML, got an error at line 2"):
        read_yaml(str(path))


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("c.toml", "a = 1\nb = ", "TOML, got an error at end of document: Invalid value"),
        ("c.toml", "a = 1\na = 2", "TOML, got an error at end of document: Cannot overwrite a value"),
        (
            "c.toml",
            "[a\n",
            "TOML, got an error at line 1, column 3: Expected ']' at the end of a table declaration",
        ),
        ("c.json", '{\n\t"a": 1,\n\t"a": 2\n}', "each key once, got 'a' twice: remove one"),
        (
            "c.json",
            '{\n\t"a": 1,\n\t"b" 2\n}',
            "JSON, got an error at line 3, column 6: Expecting ':' delimiter",
        ),
    ],
)
def test_toml_or_json_that_cannot_be_read_is_one_line(tmp_path, name, text, line):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(str(path), by_suffix=True)
    assert str(caught.value) == f"{path}: expected {line}"


@pytest.mark.parametrize("words", [["check"], ["convert", "--from", "verl"]])
def test_the_commands_refuse_a_key_that_is_there_twice(capsys, tmp_path, words):
    (tmp_path / "c.yaml").write_text("slime_ext: {preset: geo_rs}\nslime_ext: {preset: m2}")
    assert cli.main([*words, str(tmp_path / "c.yaml")]) != 0
    assert "expected each key once, got 'slime_ext' twice" in capsys.readouterr().err


def test_a_path_in_a_file_is_relative_to_the_file(tmp_path, monkeypatch):
    (tmp_path / "configs/tiny").mkdir(parents=True)
    for name in ("configs/a.yaml", "configs/tiny/x.jsonl", "here.jsonl"):
        (tmp_path / name).write_text("")
    file = str(tmp_path / "configs/a.yaml")
    monkeypatch.chdir(tmp_path)
    for path, found in {
        "tiny/x.jsonl": "configs/tiny/x.jsonl",
        "configs/tiny/x.jsonl": "configs/tiny/x.jsonl",
        "here.jsonl": "here.jsonl",
    }.items():
        assert located(path, file) == found
    monkeypatch.chdir(tmp_path / "configs/tiny")
    assert located("here.jsonl", file) == str(tmp_path / "here.jsonl")
    assert located("none.jsonl", file) == "none.jsonl"


def test_a_list_as_a_key_is_there_once(tmp_path):
    (tmp_path / "c.yaml").write_text("? [a, b]\n: 1\n? [a, b]\n: 2")
    with pytest.raises(ConfigError, match=r"expected each key once, got '\['a', 'b'\]' twice"):
        read_yaml(str(tmp_path / "c.yaml"))


def test_a_refusal_shows_a_line_of_a_value_and_control_characters_as_such(capsys, tmp_path):
    many = {f"key{i}": "x" * 40 for i in range(500)}
    long = "a" * 5000
    for content in (
        {"slime_ext": {"preset": many}},
        {"slime_ext": {"steps": many}},
        {"slime_ext": {"steps": [many]}},
        {"slime_ext": {"steps": [{"reweight": {"level": long}}]}},
        {"slime_ext": {"steps": [{long: {}}]}},
        {"slime_ext": {long: 1}},
        {"slime_ext": {"guards": {long: {"min": 0}}}},
        {"slime_ext": {"verl": {long: 1}}},
        {"slime_ext": {"preset": long}},
        {"slime_ext": {"metrics": many}},
        {"slime_ext": {"surrogate": many}},
        {"use_tis": many, "slime_ext": {}},
        {"custom_tis_function_path": f"slime_ext.tis.{long}"},
        {"slime_ext": {"preset": "a\x1b[2J\u202eb\nc"}},
    ):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
        status = cli.main(["check", str(tmp_path / "c.yaml")])
        said = capsys.readouterr().err
        assert status == 1 and "a" * 101 not in said and "x" * 101 not in said and len(said) < 2000, content
        assert said.removesuffix("\n").isprintable()


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, said in {"": "Is a directory", "none": "No such file", "bytes": "invalid start byte"}.items():
        with pytest.raises(ConfigError, match=f"expected .*, got {said}"):
            files.text_of(str(tmp_path / name))

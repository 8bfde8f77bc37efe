"""Runs a command in this process, for the tests of commands."""

from __future__ import annotations

import yaml

from slime_ext.tools.commands import cli


def run(capsys, *words):
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def written(path, text):
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path

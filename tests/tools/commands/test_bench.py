"""``slime-ext bench`` as a user meets it: what is refused, and what another Python is asked."""

from __future__ import annotations

from slime_ext.tools import fidelity
from slime_ext.tools.commands import cli

WRONG = {"fidelity token_ti": "did you mean 'token_tis'?", "speed": "invalid choice: 'speed'"}


def refused(words, capsys):
    """What is printed for a mistake, on the last line."""
    try:
        status = cli.main(["bench", *words])
    except SystemExit as left:
        status = left.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_mistake_is_one_line(capsys):
    for words, text in WRONG.items():
        assert text in refused(words.split(), capsys)


def test_fidelity_prints_a_row_for_each_preset(capsys):
    assert cli.main(["bench", "fidelity", "token_tis", "seq_is"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("token_tis", "seq_is", *fidelity.MISMATCHES))

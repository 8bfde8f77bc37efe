"""The command on whole hosts: bytes, exit status, what it prints, and that nothing is half done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime_ext.tools.commands import cli
from slime_ext.tools.patching.main import main
from tests.tools.patching.host import HOSTS, LOSS_FILE, NEW, contents, make

DONE, WOULD_CHANGE, REFUSED = 0, 1, 2
ROOT = Path(__file__).parents[3]
HOOK = (
    "def hook(args, *, pg_loss, train_log_probs, rollout_log_probs, "
    "loss_masks, total_lengths, response_lengths"
)


@pytest.fixture(params=HOSTS)
def host(request, tmp_path):
    return make(tmp_path, HOSTS[request.param])


@pytest.fixture
def new(tmp_path):
    return make(tmp_path, NEW)


def inserted(folder, before):
    """Lines that a patched tree has in addition, with their ends; every other line must be as it was."""
    added = []
    for file, source in contents(folder).items():
        lines = source.splitlines(keepends=True)
        ours = [line for line in lines if b"# slime-ext patch" in line]
        assert [line for line in lines if line not in ours] == before[file].splitlines(keepends=True)
        added += ours
    return added


def test_apply_inserts_seven_lines_with_the_files_own_line_ends(host):
    before = contents(host)
    assert main(["apply", str(host)]) == DONE
    added = inserted(host, before)
    assert len(added) == 7
    assert {line.endswith(b"\r\n") for line in added} == {b"\r\n" in before[LOSS_FILE]}


def test_a_patched_tree_compiles_and_twice_is_once(host):
    main(["apply", str(host)])
    for file, source in contents(host).items():
        compile(source, file, "exec")
    once = contents(host)
    assert main(["apply", str(host)]) == DONE
    assert contents(host) == once


def test_revert_restores_the_bytes(host):
    before = contents(host)
    main(["apply", str(host)])
    assert main(["revert", str(host)]) == DONE
    assert contents(host) == before
    assert main(["revert", str(host)]) == DONE


def test_patches_come_off_one_by_one_in_any_order(host):
    for patch, other in (("0001", "0002"), ("0002", "0001")):
        main(["revert", str(host)])
        main(["apply", str(host), patch])
        alone = contents(host)
        main(["apply", str(host)])
        main(["revert", str(host), other])
        assert contents(host) == alone, patch


def test_status_and_diff_write_nothing_and_say_what_is_missing(host, capsys):
    before = contents(host)
    assert main(["status", str(host)]) == main(["diff", str(host)]) == DONE
    out = capsys.readouterr().out
    for action in ("status", "diff"):
        assert main([action, str(host), "--exit-code"]) == WOULD_CHANGE
    assert contents(host) == before
    assert out.count("not applied") == 2
    assert out.count("\n+ ") == 7


def test_status_and_diff_of_a_patched_tree_are_clean(host, capsys):
    main(["apply", str(host)])
    capsys.readouterr()
    assert main(["diff", str(host), "--exit-code"]) == DONE
    assert capsys.readouterr().out == ""
    assert main(["status", str(host), "--exit-code"]) == DONE


def test_git_applies_what_diff_prints(host, tmp_path_factory, capfdbinary):
    copy = make(tmp_path_factory.mktemp("copy"), {f: s.decode() for f, s in contents(host).items()})
    main(["diff", str(host)])
    text = capfdbinary.readouterr().out
    subprocess.run(["git", "apply", "-"], cwd=copy, input=text, check=True)
    main(["apply", str(host)])
    assert contents(copy) == contents(host)


def test_a_half_applied_patch_is_named_and_completed(new, capsys):
    before = contents(new)
    main(["apply", str(new)])
    whole = contents(new)
    (new / "slime/ray/rollout.py").write_bytes(before["slime/ray/rollout.py"])
    assert main(["status", str(new), "--exit-code"]) == WOULD_CHANGE
    assert "partly applied" in capsys.readouterr().out
    main(["apply", str(new)])
    assert contents(new) == whole


def test_one_unknown_file_and_none_is_written(new):
    path = new / "slime/ray/rollout.py"
    path.write_text(path.read_text().replace("return train_data", "return dict(train_data)"))
    before = contents(new)
    assert cli.main(["patch", "apply", str(new)]) == REFUSED
    assert contents(new) == before


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failing_rename_puts_back_what_was_replaced(new, failing, monkeypatch):
    before, replace, calls = contents(new), Path.replace, []

    def fails(self, target):
        calls.append(target)
        if len(calls) == failing:
            raise OSError(28, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    assert cli.main(["patch", "apply", str(new)]) == REFUSED
    assert contents(new) == before


def test_killed_between_two_renames_nothing_is_lost(new):
    before = contents(new)
    code = (
        "import os, sys; from pathlib import Path; from slime_ext.tools.patching.main import main\n"
        "replace = Path.replace\n"
        "def once(self, target): replace(self, target); os._exit(9)\n"
        "Path.replace = once; main(['apply', sys.argv[1]])"
    )
    assert subprocess.run([sys.executable, "-c", code, str(new)], cwd=ROOT, check=False).returncode == 9
    assert main(["revert", str(new)]) == DONE
    assert {f: s for f, s in contents(new).items() if not f.endswith("-new")} == before
    main(["apply", str(new)])
    main(["revert", str(new)])
    assert contents(new) == before


def test_a_link_stays_a_link_and_the_mode_stays(new):
    path, elsewhere = new / LOSS_FILE, new / "elsewhere.py"
    path.rename(elsewhere)
    elsewhere.chmod(0o755)
    path.symlink_to(elsewhere)
    main(["apply", str(new), "0001"])
    assert path.is_symlink()
    assert b"cur_log_probs" in elsewhere.read_bytes()
    assert elsewhere.stat().st_mode & 0o777 == 0o755


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


@pytest.fixture
def committed(new):
    git(new, "init", "-q")
    git(new, "add", ".")
    git(new, "commit", "-qm", "host")
    return new


def test_uncommitted_changes_are_refused_in_one_line(committed, capsys):
    with (committed / LOSS_FILE).open("a") as out:
        out.write("# work in progress\n")
    assert cli.main(["patch", "apply", str(committed)]) == REFUSED
    error = capsys.readouterr().err
    assert "uncommitted" in error
    assert error.count("\n") == 1
    assert main(["apply", str(committed), "--allow-dirty"]) == DONE


@pytest.mark.parametrize("commit_ours", [False, True])
def test_our_own_lines_are_no_uncommitted_change(committed, commit_ours):
    main(["apply", str(committed), "0001"])
    if commit_ours:
        git(committed, "commit", "-qam", "patched")
    assert main(["apply", str(committed), "0002"]) == DONE


def test_exit_code_is_for_what_only_asks(new, capsys):
    assert cli.main(["patch", "apply", str(new), "--exit-code"]) == REFUSED
    assert "--exit-code: expected status or diff, got apply" in capsys.readouterr().err
    assert main(["status", str(new), "--exit-code"]) == WOULD_CHANGE


def test_a_wrong_word_is_one_line(new, capsys):
    for words, message in (
        (["apply", "/nowhere"], "expected a checkout of slime or miles"),
        (["apply", str(new), "0003"], "one of 0001, 0002|did you mean"),
    ):
        assert cli.main(["patch", *words]) == REFUSED
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert any(part in error for part in message.split("|"))


HOOKS = {
    "no_kwargs": (f"{HOOK}): ...", "cur_log_probs, advantages, weight_versions"),
    "some": (f"{HOOK}, cur_log_probs, advantages): ...", "with weight_versions"),
    "all": (f"{HOOK}, cur_log_probs, advantages, weight_versions): ...", None),
    "kwargs": (f"{HOOK}, **kwargs): ...", None),
}


def test_warns_of_hooks_that_would_break(tmp_path, capsys):
    for name, (source, warning) in HOOKS.items():
        for file, flag in (
            ("elsewhere/mine.py", ()),
            ("mine.py", ("--custom-tis-function-path", "mine.hook")),
        ):
            host = make(tmp_path / name / str(len(flag)), NEW | {file: source})
            main(["apply", str(host), *flag])
            error = capsys.readouterr().err
            assert error.count("warning:") == bool(warning), (name, flag)
            assert (warning or "") in error, (name, flag)


def test_a_hook_that_cannot_be_read_is_reported(new, capsys):
    for path in ("no.such_module.hook", "slime.backends.megatron_utils.loss.hook", "hook"):
        main(["apply", str(new), "--custom-tis-function-path", path])
        assert "its signature is not checked" in capsys.readouterr().err, path


def test_needs_no_torch():
    code = "import sys; import slime_ext.tools.patching.main; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_is_required_is_named_and_no_more(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().err.rstrip().endswith("required: action, DIR")

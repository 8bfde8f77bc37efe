"""Nothing that another file or a variable holds is in the output of ``check`` and ``doctor``."""

from __future__ import annotations

import pytest

from slime_ext.hosts.contract import flag_of
from slime_ext.hosts.flags import ARGUMENTS, COUNT, DERIVED, FUNCTION, NUMBER
from slime_ext.tools.check.veil import veiled
from slime_ext.tools.commands import cli

pytestmark = pytest.mark.usefixtures("in_process")
WORD, NUMBERS = "Xq7secretword", ("31337.625", "48611", "-48611")
OF_A_KIND = {  # what an argument of the kind can hold: each is refused, or read, in a branch of its own
    **dict.fromkeys((NUMBER, COUNT), (WORD, *NUMBERS)),
    FUNCTION: (WORD, f"slime_ext.tis.{WORD}"),
}
PARTS = ("Xq7secret", "31337", "48611")  # of them, which no message has for another reason
SOURCES = {  # how a script comes to the secret that X then has
    "a variable": ("", "$GIVEN"),
    "a variable that the script may see": ("", "$GIVEN"),
    "cat": ("X=$(cat {here}/secret)", "$X"),
    "cat of a script": ("source {here}/secret.sh\nX=$(cat {here}/secret.sh)", "$X"),
    "a redirection": ("X=$(<{here}/secret)", "$X"),
    "read": ("read -r X < {here}/secret", "$X"),
    "grep": ("X=$(grep -h . {here}/secret* | head -1)", "$X"),
    "a sourced file": ("source {here}/secret.sh", "$X"),
    "a sourced file of settings": ("source {here}/.env", "$X"),
    "a function of a sourced file": ("source {here}/secret.sh\nX=$(said)", "$X"),
    "a part of it": ("source {here}/secret.sh", "a${X:0:9}"),
    "another tool": ("source {here}/secret.sh\nX=$(echo $X | tr z y)", "$X"),
}
OURS = "--use-tis --custom-tis-function-path slime_ext.tis.token_tis"
NAMED = {flag_of(name): argument.kind for name, argument in ARGUMENTS.items() if argument.kind is not DERIVED}
PLACES = {  # of a script, beside each flag that a rule reads
    "a command": "WORD a b\npython3 train.py {ours}",
    "an unknown command's words": "curl -H WORD x\npython3 train.py {ours} --lr $(curl -H WORD x)",
    "a sourced name": "source /x/WORD\npython3 train.py {ours}",
    "a sourced file's name": "source {here}/a-WORD.sh\npython3 train.py {ours} ${{A[@]}}",
    "a sourced file that is none": "source {here}/b-WORD.sh\npython3 train.py {ours} ${{A[@]}}",
    "a test": "[ -f /x/WORD ] && A=(--eps-clip 3)\npython3 train.py {ours} ${{A[@]}}",
    "a comparison": "[[ $(hostname) == WORD ]] && A=(--eps-clip 3)\npython3 train.py {ours} ${{A[@]}}",
    "an end": 'set -e\n[ -n "" ] || {{ echo "lacks WORD"; exit 1; }}\npython3 train.py {ours}',
    "a failing test": "set -e\n[ a = WORD ]\npython3 train.py {ours}",
    "a complaint": ": ${{NONE:?WORD}}\npython3 train.py {ours}",
    "a sum": "python3 train.py {ours} --lr $((WORD + $(gpus)))",
    "a lost line": "python3 train.py {ours}\nWORD",
    "an array": "A=(--use-tis --tis-clip WORD)\npython3 train.py",
    "a flag's name": "python3 train.py {ours} --use-tsi --WORD 1",
    "text of eval": "eval WORD\npython3 train.py {ours} $FLAGS",
    "text of a shell": "bash -c 'if [ $(x) = '\"WORD\"' ]; then python3 train.py {ours}; fi'",
    "a file that is written": "cat > c.yaml <<EOF\nslime_ext: {{preset: WORD}}\nEOF\n"
    "python3 train.py --use-tis --custom-tis-function-path slime_ext.tis.correct --custom-config-path c.yaml",
    "a file": "python3 train.py --use-tis --custom-tis-function-path slime_ext.tis.correct "
    "--custom-config-path {here}/secret.yaml",
    "the program": "python3 /x/WORD/train.py {ours}",
    "a folder": "cd /x/WORD\npython3 train.py {ours} --custom-config-path c.yaml",
    "the environment": 'ray job submit --runtime-env-json \'{{"env_vars": {{"A": "\'WORD\'"}}}}\' -- '
    "python3 train.py {ours}",
}
FLAGS = {flag: f"python3 train.py {{ours}} {flag} WORD" for flag in NAMED}
FLAGS["--eps-clip"] = (
    "python3 train.py --use-tis --eps-clip WORD --custom-tis-function-path "
    "slime_ext.tis.off_policy_is_function --num-steps-per-rollout WORD"
)
SOME = ("--tis-clip", "--loss-type", "--num-steps-per-rollout", "--custom-reward-post-process-path")
KNOWN = ("a variable that the script may see", "a sourced file")  # sources of values that rules read


@pytest.fixture
def leaks(tmp_path, monkeypatch, capsys):
    """What a script shows of the secret, however it comes to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")

    def shown(secret, source, place):
        before, word = SOURCES[source]
        monkeypatch.setenv("GIVEN", secret)
        for name, text in {
            "secret": secret,
            "secret.yaml": f"token: {secret}\nslime_ext: {{preset: token_tis}}",
            "secret.sh": f"X='{secret}'\nsaid() {{ echo '{secret}'; }}",
            ".env": f"X={secret}",
            f"a-{secret}.sh": "A=(--tis-clip x)\nif smi; then A+=(--kl-coef 1); fi",
            f"b-{secret}.sh": "A=(\r\n--tis-clip x",
        }.items():
            (tmp_path / name).write_text(text)
        text = f"{before}\n{(PLACES | FLAGS)[place]}".format(here=tmp_path, ours=OURS).replace("WORD", word)
        (tmp_path / "run.sh").write_text(text)
        options = ["--env", "GIVEN"] if source == "a variable that the script may see" else []
        for command in ("check", "doctor") if place in SOME else ("check",):
            assert cli.main([command, str(tmp_path / "run.sh"), *options]) in (0, 1, 2)
        said = "".join(capsys.readouterr())
        assert said and "Traceback" not in said
        return [line for line in said.splitlines() if any(part in line for part in PARTS)]

    return shown


@pytest.mark.parametrize("source", SOURCES)
def test_no_secret_is_shown(leaks, source):
    places = [*PLACES, *(FLAGS if source == "a sourced file" else SOME)]
    found = {
        (secret, place): leaks(secret, source, place)
        for place in places
        for secret in (OF_A_KIND.get(NAMED.get(place), (WORD, f"--{WORD}")) if source in KNOWN else (WORD,))
    }
    assert not {case: lines for case, lines in found.items() if lines}


def test_a_value_that_may_be_seen_counts(leaks, tmp_path, capsys):
    """So that hiding everything would not do."""
    (tmp_path / "run.sh").write_text(
        "source secrets.sh\npython3 train.py --use-tis --tis-clip $CAP --tis-clip-low 0.5 "
        "--custom-tis-function-path slime_ext.tis.vanilla_tis_function"
    )
    (tmp_path / "secrets.sh").write_text("CAP=0.25\n")
    assert cli.main(["check", str(tmp_path / "run.sh")]) == 1
    said = capsys.readouterr().err
    assert "--tis-clip: expected more than --tis-clip-low 0.5, got $CAP: every" in said
    (tmp_path / "secrets.sh").write_text("CAP=3\n")
    assert cli.main(["check", str(tmp_path / "run.sh")]) == 0
    assert "clip(low 0.5, high $CAP)" in capsys.readouterr().out


def test_what_a_number_is_computed_into_is_veiled_too():
    two, half = veiled(2, "$N"), veiled(0.5, "$H")
    for found in (two * 3, 3 * two, two // 1, 1 - half, two + 0.5, -half, abs(-half), max(1, two)):
        assert f"{found}" in ("$N", "$H") and repr(found) in ("$N", "$H")
    assert two * 3 == 6 and 1 - half == 0.5 and veiled(True, "$B") is True and veiled("a", "") == "a"

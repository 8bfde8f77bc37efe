"""Words of a launch that the host would not take as the flags that they look like."""

from __future__ import annotations

import pytest

from tests.tools.commands.in_process import run, written

pytestmark = pytest.mark.usefixtures("in_process")
INIT = "--custom-megatron-init-path slime_ext.host.init"
TT = "--custom-tis-function-path slime_ext.tis.token_tis"
JOINED = "expected --custom-tis-function-path and what follows it as two words, got one"
REFUSED = {  # a script -> a part of its one line
    f'python3 train.py {INIT} --use-tis "{TT}"': f"run.sh:1: {JOINED}, which the host ignores: remove the q",
    f"python3 train.py {INIT} --use-tis '{TT}'": JOINED,
    f'A=({INIT} --use-tis "{TT}")\npython3 train.py "${{A[@]}}"': f"run.sh:1: {JOINED}",
    f'A=(--use-tis\n"{TT}")\npython3 train.py {INIT} "${{A[@]}}"': f"run.sh:2: {JOINED}",
    f'EXTRA="--use-tis {TT}"; python3 train.py {INIT} "$EXTRA"': "expected --use-tis and what follows it",
    f'E=""; E="$E --use-tis {TT}"; python3 train.py {INIT} "$E"': "expected --use-tis and what follows it",
    f'E="--lr 1 --use-tis {TT}"; python3 train.py {INIT} "$E"': "expected --lr and what follows it",
    f'EXTRA="{INIT} --use-tis {TT}"; python3 train.py "$EXTRA"': "expected --custom-megatron-init-path and",
    f'EXTRA="{INIT} --use-tis {TT}"; python3 train.py --bf16 "$EXTRA"': "expected --custom-megatron-init-pa",
    f'mapfile -t A <<< "--use-tis {TT}"\npython3 train.py {INIT} "${{A[@]}}"': "expected --use-tis and what",
    f'A=(--lr 1 --x 2)\npython3 train.py {INIT} "${{A[*]}}"': "expected --lr and what follows it as two wo",
    f"python3 train.py {INIT} --use-tis {TT.replace(' ', chr(0xA0))}": "write a plain space for U+00A0",
    f"python3 train.py {INIT} --use-tis{chr(0x200B)} {TT}": "write a plain space for U+200B",
    f'python3 train.py {INIT} --use-tis {TT} "--eps-clip-high $(ours)"': "expected --eps-clip-high and what",
    f'python3 train.py {INIT} --use-tis {TT} "--use-tis "': "expected --use-tis and what follows it",
    f'python3 train.py {INIT} "--custom-config-path c.yaml"': "expected --custom-config-path and what foll",
    f"python3 train.py {INIT} --use-tis{TT}": "run.sh:1: expected a space between --use-tis and --custom-ti",
    f"python3 train.py {INIT} --colocate--use-tis {TT}": "expected a space between --colocate and --use-tis",
    f"python3 train.py {INIT} --use-tis--colocate {TT}": "expected a space between --use-tis and --colocate",
    f"python3 train.py {INIT} --use-tis {TT} --custom-config c.yaml": "expected --custom-config-path, got",
    f"python3 train.py {INIT} --use-tis {TT.replace('-function-path', '')}": "expected --custom-tis-function",
}  # fmt: skip
ACCEPTED = [  # what follows the flags of a right launch, or a whole script
    '--wandb-group="--use-tis with a cap"',
    '--wandb-group "--a b" --x 1',
    "--apply-chat-template-kwargs '{\"a\": 1}'",
    '--prompt "Say --use-tis twice"',
    '--rollout-stop "-- end"',
    "--save /out/run--use-tis",
    "--my-own--flag 1",
    '"" --x 1',
]


@pytest.mark.parametrize("text", REFUSED)
def test_a_word_that_is_several_is_refused(capsys, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "c.yaml", {"slime_ext": {"preset": "token_tis"}})
    status, out, err = run(capsys, "check", written(tmp_path / "run.sh", text))
    assert (status, out) == (1, "") and REFUSED[text] in err and err.count("\n") == 1, err or out


@pytest.mark.parametrize("words", ACCEPTED)
def test_a_value_with_white_space_is_none(capsys, tmp_path, words):
    path = written(tmp_path / "run.sh", f"python3 train.py {INIT} --use-tis {TT} {words}")
    status, out, err = run(capsys, "check", path)
    assert (status, err) == (0, "") and out.endswith("ok\n"), err or out


def test_a_flag_that_is_added_on_some_machines_is_one_word(capsys, tmp_path):
    text = f'X=""\nsmi && X+="--use-tis"\npython3 train.py {INIT} {TT} --get-mismatch-metrics "$X"'
    status, _, err = run(capsys, "check", written(tmp_path / "run.sh", text))
    assert (status, err) == (0, "")

"""The conditional parts of a script: bash itself says where a command may follow one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slime_ext.tools.launch import blocks
from tests.tools.launch import bash
from tests.tools.launch.own_scripts import GIVEN_WORDS, SCRIPTS

HOSTS = Path(os.environ.get("HOSTS", "absent"))
ODD = r"""
if [ -n "$(cat <<EOF
if not; then
EOF
)" ]; then echo 'fi'; fi # fi && a
case "$1" in (a|b) echo "a)" && x=1 ;; *) case x in x) ;; esac; esac
f() { [ "$1" ] || return; echo "${X:-"}"}"; }
function g { while read -r line; do echo "$line" | grep -q "a && b" && break; done <<< "a"; }
A=(1 "2 && 3" # it's a comment with && and )
   $((1 << 2)) `echo "$(echo 4)"`)
[[ $1 == a && ( $2 == b || "$3" == "]]" ) ]] && echo yes || echo no
(( 1 && 2 )) && for ((i = 0; i < 2; i++)); do echo $i; done
cat <<-'EOF' | sort && echo "<<EOF" > /dev/null 2>&1
	if && (
	EOF
until false || true; do :; done; ! true && echo a
echo $'it\'s' "$'" $# ${#A[@]} &> /dev/null &
for x in a "b c" $(echo d); do echo $x; done
train.py end "${A[@]}"
"""


def marked(text: str) -> str:
    """A script with a command behind each block, and one in the words of each ``case`` and ``for``."""
    found = blocks.read(text)
    put = {offset: f"$(: {' '.join(words.split())})" for offset, words in found.probes.items()}
    for block in found.found:
        put[block.end] = put.get(block.end, "") + "; :"
    for offset in sorted(put, reverse=True):
        text = text[:offset] + put[offset] + text[offset:]
    return text


def faults(path: Path, text: str) -> str:
    """What bash has against a script that is marked, if it had nothing before."""
    check = ["bash", "-n"]
    if subprocess.run(check, input=text, text=True, capture_output=True, check=False).returncode:
        return ""
    said = subprocess.run(check, input=marked(text), text=True, capture_output=True, check=False).stderr
    if said or "train" not in text or "profile" in path.name:  # which waits for other nodes
        return said
    launches = []
    for each in (text, marked(text)):
        path.write_text(each)
        launches.append(bash.launches(path, GIVEN_WORDS, {"HOME": "/home"}))
    return "" if launches[0] == launches[1] else f"{launches[1]}, before: {launches[0]}"


@pytest.mark.parametrize("name", [*SCRIPTS, "odd"])
def test_a_command_behind_each_block_changes_nothing(name, tmp_path):
    text = ODD if name == "odd" else SCRIPTS[name]
    assert faults(tmp_path / "run.sh", text) == ""


@pytest.mark.skipif(not HOSTS.is_dir(), reason="HOSTS names no folder of hosts")
@pytest.mark.slow
def test_nor_does_it_in_any_script_of_the_hosts(tmp_path):
    scripts = sorted({path.read_text(): path.name for path in HOSTS.glob("*/**/*.sh")}.items())
    wrong = {name: said for text, name in scripts if (said := faults(tmp_path / name, text))}
    assert not wrong and len(scripts) > 100


def heads(text: str) -> list[list[str]]:
    found = blocks.read(text).found
    return [[" ".join(text[begin:end].split()).rstrip("; ") for begin, end in block.heads] for block in found]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("if a; then b; elif c && d; then e; else f; fi", [["a", "c && d"]]),
        ("while a\ndo\n  b || c\ndone", [["b"], ["a"]]),
        ("case $x in a) b;; esac", [["$x"]]),
        ("for i in 1 $n; do a; done", [["i in 1 $n"]]),
        ("a && b || c; d", [["a && b"]]),
        ("a | b && c", [["a | b"]]),
        ("X=$(a || b)", [["X=$(a || b)"]]),
        ("f() {\n  a && b\n}\nf", [["a"]]),
        ("(a && b) || c", [["a"], ["(a && b)"]]),
        ("a; b # && c\n'd && e' \"f || g\"\n[[ h && i ]]", []),
        ("cat <<E\na && b\nE\nc", []),
    ],
)
def test_the_conditions_of_a_block(text, found):
    assert heads(text) == found


@pytest.mark.parametrize("text", ["a && b # c\nd", "a && b # c", "if a; then b; fi # c && d\ne"])
def test_a_block_ends_before_a_comment(text):
    (block,) = blocks.read(text).found
    assert text[block.end :].startswith("# c")

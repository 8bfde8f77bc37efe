"""What bash itself gives to train.py: a script is run with no command on its PATH, and each that it would
start is written down instead."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("train.py", "train_async.py")
LIMIT_S = 60
HANDLER = r"""
trap "" PIPE  # what reads a pipe here ends at once
exec() { [ $# -gt 0 ] || return 0; "$@"; exit; }
command_not_found_handle() {
   case $1 in
      dirname) local path="${@: -1}"
         case $path in */*) path="${path%/*}"; echo "${path:-/}";; *) echo .;; esac;;
      basename) local path="${2%/}"; path="${path##*/}"
         [ "$path" = "${3-}" ] || path="${path%"${3-}"}"; echo "$path";;
      seq) local n=1 step=1
         [ $# -gt 2 ] && n=$2; [ $# -gt 3 ] && step=$3
         for ((; n <= ${@: -1}; n += step)); do echo $n; done;;
      cat) local line; while IFS= read -r line; do printf '%s\n' "$line"; done;;
      awk|cut|grep|head|sed|sort|tail|tr|uniq|wc) PATH=/usr/bin:/bin command "$@";;
      bash|sh) /bin/bash "${@:2}";;
      *) printf '%s\0' "$@" > "$RECORD_FOLDER/$EPOCHREALTIME.$BASHPID"
         local record=("$RECORD_FOLDER"/*)
         [[ $* != *train*.py* || ${#record[@]} -gt $FAILURES ]];;
   esac
}
"""
LENIENT = 'set() { builtin set "$@"; builtin set +eu; }\n'  # for scripts whose variables the cluster sets


def launches(
    script: Path,
    given: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    *,
    lenient: bool = False,
    failures: int = 0,
) -> list[list[str]]:
    """The words behind train.py of each launch, in their order.

    Args:
        failures: so many of the first commands fail if they are launches.
    """
    with tempfile.TemporaryDirectory() as folder:
        record, handler = Path(folder, "record"), Path(folder, "handler.sh")
        handler.write_text(HANDLER + (LENIENT if lenient else ""))
        record.mkdir()
        own = {"PATH": "/none", "HOME": folder, "BASH_ENV": str(handler), "RECORD_FOLDER": str(record)}
        own["FAILURES"] = str(failures)
        subprocess.run(
            ["/bin/bash", str(script), *given],
            env=own | (environment or {}),
            cwd=folder,
            timeout=LIMIT_S,
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
        commands = [file.read_text().split("\0")[:-1] for file in sorted(record.iterdir())]
    return [found for words in commands if (found := _behind_program(words)) is not None]


def _behind_program(words: list[str]) -> list[str] | None:
    if words[0] in ("pkill", "grep", "tee", "cat"):
        return None
    at = next((i for i, word in enumerate(words) if Path(word).name in PROGRAMS), None)
    return None if at is None else words[at + 1 :]

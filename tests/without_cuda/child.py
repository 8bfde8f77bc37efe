"""In place of `host_process`: runs a folder's script without Ray, and without imports beforehand."""

import runpy
import sys

words = sys.argv[1 : sys.argv.index("--")]
script = f"{words[words.index('--host') + 1]}/train{'_async' if '--async' in words else ''}.py"
sys.argv = [script, *sys.argv[sys.argv.index("--") + 1 :]]
runpy.run_path(script, run_name="__main__")

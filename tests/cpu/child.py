"""In place of `host_process`: runs a folder's script without Ray, and without imports beforehand."""

import json
import runpy
import sys

given = json.loads(sys.argv[1])
script = f"{given['host']}/train{'_async' if given['asynchronous'] else ''}.py"
sys.argv = [script, *sys.argv[2:]]
runpy.run_path(script, run_name="__main__")

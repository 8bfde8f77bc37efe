"""Causes in logs of hosts."""

from __future__ import annotations

from slime_ext_cpu.host_log import cause_of, plain_lines

REMOTE = """\
Traceback (most recent call last):
  File "/slime/train.py", line 101, in <module>
    train(args)
  File "/env/ray/_private/worker.py", line 961, in get_objects
    raise value.as_instanceof_cause_of()
\x1b[36mray.exceptions.RayTaskError(HTTPError): \x1b[36mray::Actor.update_weights()\x1b[39m (pid=16002)
  File "/slime/backends/sglang_engine.py", line 418, in update
    return self._make_request()
requests.exceptions.HTTPError: 400 Client Error
response.text='{"success":false}'
(SGLangEngine pid=458)   warnings.warn(
"""
KILLED = """\
ConnectionError: of a call that was made once more (later it went well)
Traceback (most recent call last):
  File "/slime/train.py", line 101, in <module>
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
	class_name: TrainRayActor
"""
ENGINE_KILLED = """\
[2026-11-24 18:09:15] Subprocess scheduler_0 (pid=20294) crashed with exit code -9. Triggering SIGQUIT
requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104))
"""
LOGS = {
    REMOTE: "HTTPError: 400 Client Error (/slime/backends/sglang_engine.py:418)",
    "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x\n": "unrecognized arguments: --x",
    '  File "a.py", line 3, in f\nAssertionError\n': "AssertionError (a.py:3)",
    '  File "a.py", line 3, in f\n    assert x > 0\n           ^^^^^\nAssertionError\nmore': (
        "AssertionError: assert x > 0 (a.py:3)"
    ),
    "(Actor pid=3) slime_ext.errors.ConfigError: a: got c\nlater\n": "ConfigError: a: got c",
    "ray.exceptions.ActorDiedError: The actor died: no memory\n": "ActorDiedError: The actor died: no memory",
    "ValueError: first\nray.exceptions.ActorDiedError: The actor died\n": "ValueError: first",
    KILLED: "the host's TrainRayActor was killed, by a user or because memory ran out",
    ENGINE_KILLED: "the engine's process scheduler_0 (SGLang) was killed by SIGKILL, by a user or because "
    "memory ran out",
    "requests.exceptions.ConnectionError: x\n": "the engine does not answer; perhaps it was killed, by a "
    "user or because memory ran out: ConnectionError: x",
    "ValueError: first\nSubprocess scheduler_0 (pid=20294) crashed with exit code -9\n": "ValueError: first",
    "Killed\n\n": "Killed",
    "": "the log is empty",
}


def test_the_exception_of_the_host_is_found_without_what_ray_wraps_around_it(tmp_path):
    for log, line in LOGS.items():
        (tmp_path / "log").write_text(log)
        assert cause_of(plain_lines(tmp_path / "log")) == line

#!/usr/bin/env bash
# If an exception's constructor takes more than the message, Ray replaces it by one of its own. An `except`
# for the class does not catch it, and its attributes are lost.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" ray==2.60.0
run - <<'PYTHON'
import ray
from recorded import expect

ray.init(num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)


class WithMessage(Exception):
    pass


class WithStep(Exception):
    def __init__(self, message, step):
        super().__init__(message)
        self.step = step


@ray.remote
def fail(kind):
    raise WithMessage("diverged") if kind == "message" else WithStep("diverged", 7)


def error_of(kind):
    try:
        ray.get(fail.remote(kind))
    except Exception as error:
        return error


print("ray", ray.__version__)
plain, with_step = error_of("message"), error_of("step")
for name, error in (("Exception(message)", plain), ("Exception(message, step)", with_step)):
    print(f"  {name:24} arrives as {type(error).__module__}.{type(error).__name__}")
expect("an exception with a message alone keeps its class", isinstance(plain, WithMessage))
expect("one with another argument does not", not isinstance(with_step, WithStep))
expect("its attribute is not on the error, nor on the cause",
       not hasattr(with_step, "step") and not hasattr(getattr(with_step, "cause", None), "step"))
ray.shutdown()
PYTHON

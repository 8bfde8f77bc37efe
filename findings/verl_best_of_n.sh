#!/usr/bin/env bash
# verl's best@N draws N of the answers with replacement. With N answers to a question, it is below the best of them,
# and maj@N below the majority.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch verl==0.9.1
run - <<'PYTHON' 2> errors
from importlib.metadata import version

from recorded import expect
from verl.trainer.ppo.metric_utils import process_validation_metrics


def metrics(rewards: list[float]) -> dict[str, float]:
    count = len(rewards)
    answers = ["right" if reward else "wrong" for reward in rewards]
    result = process_validation_metrics(["math"] * count, ["question"] * count, {"reward": rewards, "pred": answers})
    return result["math"]["reward"]


one_of_8, five_of_8 = metrics([1.0] + [0.0] * 7), metrics([1.0] * 5 + [0.0] * 3)
print("verl", version("verl"), "one question with 8 answers:")
print("  1 right:", {name: round(float(one_of_8[name]), 3) for name in ("mean@8", "best@8/mean")})
print("  5 right:", {name: round(float(five_of_8[name]), 3) for name in ("mean@8", "worst@8/mean", "maj@8/mean")})
expect("with one right answer of 8, best@8 is not 1, but near 1 - (7/8)^8 = 0.656",
       abs(one_of_8["best@8/mean"] - 0.656) < 0.06)
expect("with 5 right answers of 8, the majority of all is right, and maj@8 is below 0.9", five_of_8["maj@8/mean"] < 0.9)
expect("with 3 wrong answers of 8, worst@8 is above 0", five_of_8["worst@8/mean"] > 0)
PYTHON

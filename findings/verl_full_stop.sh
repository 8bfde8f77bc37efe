#!/usr/bin/env bash
# verl's reward for GSM8K is 0 for "#### 18." and "#### $18", although 18 is right. SkyRL's has the same pattern, but
# takes the first answer of several, where verl takes the last.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch verl==0.9.1 skyrl-gym==0.4.0
run - <<'PYTHON' 2> errors
from importlib.metadata import version

from recorded import expect
from skyrl_gym.envs.gsm8k.utils import compute_score as of_skyrl
from verl.utils.reward_score.gsm8k import compute_score as of_verl

ANSWERS = ["#### 18", "#### 18.", "#### $18", "#### 18.00", "#### 4\nNo.\n#### 18", "#### 18\nNo.\n#### 4"]
print("verl", version("verl"), "skyrl-gym", version("skyrl-gym"), "rewards for the label 18:")
seen = {answer: (of_verl(answer, "18"), of_skyrl(answer, "18")) for answer in ANSWERS}
loose = {answer: (of_verl(answer, "18", "flexible"), of_skyrl(answer, "18", "flexible")) for answer in ANSWERS}
for answer, (by_verl, by_skyrl) in seen.items():
    print(f"  {answer!r:27} verl {by_verl}, skyrl {by_skyrl}; flexible {loose[answer]}")
expect("18 is right", seen["#### 18"] == (1, 1))
expect("a full stop, a dollar sign and zeros make it wrong",
       all(seen[answer] == (0, 0) for answer in ("#### 18.", "#### $18", "#### 18.00")))
expect("the flexible method knows the dollar sign alone",
       loose["#### $18"] == (1, 1) and loose["#### 18."] == loose["#### 18.00"] == (0, 0))
expect("of two answers verl takes the last and skyrl the first",
       seen["#### 4\nNo.\n#### 18"] == (1, 0) and seen["#### 18\nNo.\n#### 4"] == (0, 1))
PYTHON

#!/usr/bin/env bash
# The texts of two concatenated TensorDicts are a list if they differ, and a single text if they are equal. A loop
# over the answers of a batch then goes over the characters of one answer.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 tensordict==0.15.3
run - <<'PYTHON'
import tensordict
import torch
from recorded import expect
from tensordict import TensorDict


def answers(*texts: str) -> object:
    """Returns the texts of one batch that is made of a batch for each text."""
    parts = [TensorDict({"tokens": torch.zeros(1, 2), "answer": text}, batch_size=[1]) for text in texts]
    return torch.cat(parts, 0)["answer"]


different, equal = answers("yes", "no"), answers("yes", "yes")
print("tensordict", tensordict.__version__, "answers", list(different), "and", repr(equal))
expect("two different texts are a list of two", list(different) == ["yes", "no"])
expect("two equal texts are one text", equal == "yes")
expect("whose length is the number of its characters", len(equal) == 3)
PYTHON

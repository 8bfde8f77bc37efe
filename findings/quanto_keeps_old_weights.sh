#!/usr/bin/env bash
# A frozen model of optimum-quanto that loads weights that are not quantised answers that all keys match, and keeps
# the weights that it had. A sampler that is updated like this stays at its first policy.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 optimum-quanto==0.2.7
run - <<'PYTHON' 2> errors
from importlib.metadata import version

import torch
from optimum.quanto import freeze, qfloat8, qint8, quantize
from recorded import expect

torch.manual_seed(0)
OLD, NEW, X = torch.randn(64, 64), torch.randn(64, 64), torch.randn(16, 64)


def model(weights: object) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    made[0].weight.data.copy_(OLD)
    quantize(made, weights=weights)
    freeze(made)
    return made


def errors(made: torch.nn.Module) -> tuple[float, float]:
    """Returns the errors of the outputs, against those of the new and of the old weights."""
    with torch.no_grad():
        return tuple(((made(X) - X @ w.T).norm() / (X @ w.T).norm()).item() for w in (NEW, OLD))


print("optimum-quanto", version("optimum-quanto"), "errors against the new and the old weights, after an update:")
kept, assigned = [], []
for weights in (qint8, qfloat8):
    loaded, copied, replaced = model(weights), model(weights), model(weights)
    answer = loaded.load_state_dict({"0.weight": NEW.clone()})
    with torch.no_grad():
        copied[0].weight.copy_(NEW)
    replaced.load_state_dict({"0.weight": NEW.clone()}, assign=True)
    for name, made in (("load_state_dict", loaded), ("copy_", copied), ("load_state_dict with assign", replaced)):
        new, old = errors(made)
        print(f"  {weights.name}, {name}: {new:.2f} and {old:.2f}")
        (assigned if made is replaced else kept).append((new, old))
    print(f"  {weights.name}, the answer: {answer}")
    expect("no key is named", not answer.missing_keys and not answer.unexpected_keys)
expect("outputs are those of the old weights", all(old < 0.05 and new > 1 for new, old in kept))
expect("with assign=True they are those of the new ones", all(new < 0.05 and old > 1 for new, old in assigned))
PYTHON

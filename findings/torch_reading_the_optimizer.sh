#!/usr/bin/env bash
# get_optimizer_state_dict makes a step if the optimizer has made none, and the optimizer's state counts it. A run
# that saves a checkpoint before its first step makes other first steps than a run that saves none.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON' 2> errors
import torch
from recorded import expect
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

OPTIMIZERS = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1, weight_decay=0),
    "SGD with momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "SGD with dampening": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.9),
}


def steps(optimizer: str, is_read: bool) -> list[float]:
    """Returns how far each of three steps moves a weight whose gradient is 1."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    made = OPTIMIZERS[optimizer](model.parameters())
    if is_read:
        state = get_optimizer_state_dict(model, made)
        counted = state["state"]["weight"].get("step")
        assert model.weight.item() == 0 and (optimizer != "AdamW" or counted == 1)
    places = [0.0]
    for _ in range(3):
        made.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        made.step()
        places.append(model.weight.item())
    return [round(before - after, 4) for before, after in zip(places, places[1:], strict=False)]


print("torch", torch.__version__, "sizes of the first steps, without and with get_optimizer_state_dict before:")
seen = {name: (steps(name, False), steps(name, True)) for name in OPTIMIZERS}
for name, (plain, read) in seen.items():
    print(f"  {name}: {plain} and {read}")
expect("AdamW's first step is 26% smaller", seen["AdamW"][0][0] == 0.1 and 0.073 < seen["AdamW"][1][0] < 0.075)
expect("SGD's with dampening is 90% smaller", seen["SGD with dampening"] == ([0.1, 0.1, 0.1], [0.01, 0.019, 0.0271]))
expect("SGD's with momentum alone is the same", len(set(map(tuple, seen["SGD with momentum"]))) == 1)
PYTHON

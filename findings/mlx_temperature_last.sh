#!/usr/bin/env bash
# mlx-lm applies top-p before the temperature. Which tokens can be drawn does not depend on the temperature then,
# whereas transformers keeps the tokens that have the mass at that temperature.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2
run - <<'PYTHON' 2> errors
from importlib.metadata import version

import mlx.core as mx
import torch
from mlx_lm.sample_utils import make_sampler
from recorded import expect
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

PROBABILITIES, TOP_P, DRAWS = [0.5, 0.2, 0.15, 0.1, 0.05], 0.8, 4000
logits = torch.tensor([PROBABILITIES]).log()


def shares(temperature: float) -> tuple[list[float], list[float]]:
    """Returns how often each token is drawn by mlx-lm, and its probability after transformers' warpers."""
    mx.random.seed(0)
    sampler = make_sampler(temp=temperature, top_p=TOP_P)
    drawn = sampler(mx.array([logits[0].tolist()] * DRAWS)).tolist()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopPLogitsWarper(TOP_P)])
    return [drawn.count(token) / DRAWS for token in range(5)], warpers(None, logits).softmax(-1)[0].tolist()


print("mlx-lm", version("mlx-lm"), "transformers", version("transformers"), "top-p", TOP_P, "of", PROBABILITIES)
kept = {}
for temperature in (0.5, 1.0, 2.0):
    kept[temperature] = []
    for name, values in zip(("mlx-lm draws", "transformers would draw"), shares(temperature), strict=True):
        print(f"  temperature {temperature}, {name}:", *(f"{value:.2f}" for value in values))
        kept[temperature].append(sum(value > 0 for value in values))
expect("at temperature 1 both keep three tokens", kept[1.0] == [3, 3])
expect("at 0.5 mlx-lm keeps three and transformers two", kept[0.5] == [3, 2])
expect("at 2 mlx-lm keeps three and transformers four", kept[2.0] == [3, 4])
PYTHON

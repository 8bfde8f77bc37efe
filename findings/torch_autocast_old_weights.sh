#!/usr/bin/env bash
# Within one region of autocast, torch keeps the bfloat16 copy of each weight. An optimizer step or a loaded weight
# changes no result until the region ends.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import torch
from recorded import expect

torch.manual_seed(0)
x = torch.randn(4, 8)


def sees_change(change: str, **options: object) -> tuple[bool, bool]:
    """Returns whether a forward differs after the change in the same region, and in the next one."""
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with torch.autocast("cpu", torch.bfloat16, **options):
        before = layer(x)
        if change == "optimizer step":
            before.float().square().mean().backward()
            optimizer.step()
        else:
            layer.load_state_dict(torch.nn.Linear(8, 8).state_dict())
        within = layer(x)
        with torch.no_grad():
            without_gradient = layer(x)
    assert torch.equal(within, without_gradient)
    with torch.autocast("cpu", torch.bfloat16, **options):
        return not torch.equal(before, within), not torch.equal(before, layer(x))


print("torch", torch.__version__, "whether the next forward differs in the same region, in the next region:")
seen = {}
for change in ("optimizer step", "load_state_dict"):
    for cache in (True, False):
        seen[change, cache] = sees_change(change, cache_enabled=cache)
        print(f"  after {change} with cache_enabled={cache}:", *seen[change, cache])
expect("a change within the region is not seen", not any(seen[key][0] for key in seen if key[1]))
expect("it is seen in the next region", all(seen[key][1] for key in seen))
expect("without the cache it is seen at once", all(seen[key][0] for key in seen if not key[1]))
PYTHON

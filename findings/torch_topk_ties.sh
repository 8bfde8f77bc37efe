#!/usr/bin/env bash
# Equal logits, which are common in bfloat16: torch.argmax takes the first of them, torch.topk and torch.sort put
# any of them first. So the greedy token may not be the first of the top log-probs.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import torch
from recorded import expect

torch.manual_seed(0)
logits = 3 * torch.randn(1000, 50_000)
rounded = logits.bfloat16()
greedy = rounded.argmax(1)
tied = (rounded == rounded.amax(1, keepdim=True)).sum(1) > 1
first = (rounded == rounded.amax(1, keepdim=True)).int().argmax(1)
others = {
    "topk(1)": rounded.topk(1).indices[:, 0],
    "topk(5)": rounded.topk(5).indices[:, 0],
    "topk(20)": rounded.topk(20).indices[:, 0],
    "topk(20) of the same in float32": rounded.float().topk(20).indices[:, 0],
    "sort": rounded.sort(descending=True).indices[:, 0],
    "sort, stable": rounded.sort(descending=True, stable=True).indices[:, 0],
}
print("torch", torch.__version__, "- rows with equal largest logits:", int(tied.sum()), "of", len(tied))
differ = {name: int((tokens != greedy).sum()) for name, tokens in others.items()}
for name, count in differ.items():
    print(f"  {name}: another token than argmax in {count}")
expect("more than 2% of the rows have equal largest logits in bfloat16", tied.sum() > 20)
expect("argmax takes the first", bool((greedy == first).all()))
expect("topk(5) and topk(20) take another one in more than a third of them",
       all(3 * differ[name] > tied.sum() for name in ("topk(5)", "topk(20)")))
expect("so does topk in float32, and sort in more than a tenth",
       3 * differ["topk(20) of the same in float32"] > tied.sum() and 10 * differ["sort"] > tied.sum())
expect("topk(1) and a stable sort agree with argmax", differ["topk(1)"] == differ["sort, stable"] == 0)
PYTHON

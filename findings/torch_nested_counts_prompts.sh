#!/usr/bin/env bash
# torch.nested.narrow makes a nested tensor of a part of each row. The sum, mean and maximum over all of it count what
# lies outside these parts, too: the mean of the answers' log-probs has the prompts and the padding in it.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON' 2> errors
import torch
from recorded import expect

values = torch.tensor([[100.0, 1, 2, 100, 100], [100, 100, 3, 4, 5]])
starts, lengths = torch.tensor([1, 2]), torch.tensor([2, 3])
answers = torch.nested.narrow(values, 1, starts, lengths, layout=torch.jagged)
copied = answers.contiguous()


def raises(call) -> bool:
    try:
        call()
    except RuntimeError:
        return True
    return False


print("torch", torch.__version__, "answers", [row.tolist() for row in answers.unbind()])
for name, nested in {"narrow": answers, "narrow, then contiguous": copied}.items():
    mean, largest = nested.mean().item(), nested.max().item()
    print(f"  {name}: {nested.numel()} numbers, sum {nested.sum().item()}, mean {mean}, maximum {largest}")
expect("the answers are 1 to 5", torch.cat(answers.unbind()).tolist() == [1, 2, 3, 4, 5])
expect("sum, mean and maximum count all 10 numbers",
       [answers.sum(), answers.mean(), answers.max()] == [values.sum(), values.mean(), 100])
expect("values() has all of them, also after an operation", (answers * 2).values().numel() == 10)
expect("a sum of each row raises an error", raises(lambda: answers.sum(1)))
expect("after contiguous() all are right", [copied.sum(), copied.mean(), copied.max()] == [15, 3, 5])
PYTHON

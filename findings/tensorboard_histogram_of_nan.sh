#!/usr/bin/env bash
# A histogram for TensorBoard with NaN or infinity is written without an error: the values are in no bucket,
# but they count, so the picture shows fewer values than the file says.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 tensorboard==2.21.0
run - <<'PYTHON' 2> errors
import tensorboard
import torch
from recorded import expect
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

with SummaryWriter("events") as writer:
    writer.add_histogram("nan", torch.tensor([1.0, float("nan"), 2.0]), 0)
    writer.add_histogram("inf", torch.tensor([1.0, float("inf"), 2.0]), 0)
events = EventAccumulator("events").Reload()
print("tensorboard", tensorboard.__version__, "torch", torch.__version__.split("+")[0])
histograms = {}
for name in ("nan", "inf"):
    histogram = histograms[name] = events.Histograms(name)[0].histogram_value
    print(f"  three values with {name}: num {histogram.num}, in buckets {sum(histogram.bucket)}, "
          f"min {histogram.min}, max {histogram.max}, sum {histogram.sum}")
expect("both count three values and show two",
       all(h.num == 3 and sum(h.bucket) == 2 for h in histograms.values()))
expect("with NaN, minimum and sum are NaN", histograms["nan"].min != histograms["nan"].min)
PYTHON

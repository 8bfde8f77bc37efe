#!/usr/bin/env bash
# webdataset ends a key at the first dot. Samples whose keys have a number with a point are read as one sample, whose
# fields have the rest of the key in their names.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 webdataset==1.0.2
run - <<'PYTHON'
import webdataset
from recorded import expect

with webdataset.TarWriter("samples.tar") as writer:
    for temperature in (0.5, 0.7):
        writer.write({"__key__": f"answer-{temperature}", "txt": f"sampled at {temperature}"})
samples = list(webdataset.WebDataset("samples.tar", shardshuffle=False))
fields = [{name: value for name, value in sample.items() if name[0] != "_"} for sample in samples]
print("webdataset", webdataset.__version__, [sample["__key__"] for sample in samples], fields)
expect("two samples are read as one", len(samples) == 1)
expect("under the first part of the key", samples[0]["__key__"] == "answer-0")
expect("and none has the field txt", fields == [{"5.txt": b"sampled at 0.5", "7.txt": b"sampled at 0.7"}])
PYTHON

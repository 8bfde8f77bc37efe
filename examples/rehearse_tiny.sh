#!/bin/bash
# Trains the tiny task (copy four letters) with a launch script like those of slime and miles, for `slime-ext rehearse`.
# `make rehearse` runs two rollouts of it with miles from the package index, without a GPU.
set -ex

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
TINY="${HERE}/../configs/tiny"

MODEL_ARGS=(
   --swiglu
   --num-layers 2
   --hidden-size 128
   --ffn-hidden-size 256
   --num-attention-heads 4
   --group-query-attention
   --num-query-groups 2
   --kv-channels 32
   --use-rotary-position-embeddings
   --disable-bias-linear
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   --rotary-base 10000
   --vocab-size 16
   --qk-layernorm
   --untie-embeddings-and-output-weights
)

CKPT_ARGS=(
   --hf-checkpoint "${TINY}/model"
   --ref-load "${TINY}/model"
   --save "${SAVE:-runs/rehearse_tiny}"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "${TINY}/train.jsonl"
   --input-key input
   --label-key label
   --rollout-shuffle
   --custom-rm-path slime_ext_cpu.tiny.reward
   --num-rollout 60
   --rollout-batch-size 32
   --n-samples-per-prompt 16
   --rollout-max-response-len 5
   --rollout-temperature 1
   --global-batch-size 128 # four optimizer steps per rollout
   --micro-batch-size 128
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
   --entropy-coef 0.06
   --custom-config-path "${HERE}/../configs/modes/decoupled.yaml"
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-3
   --lr-decay-style linear
   --weight-decay 0.0
   --adam-beta2 0.95
)

ray job submit --address="http://127.0.0.1:8265" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 4 \
   --rollout-num-gpus 4 \
   "${MODEL_ARGS[@]}" \
   "${CKPT_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}"

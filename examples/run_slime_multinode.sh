#!/bin/bash
# Trains Qwen3-32B with GRPO on four nodes of eight GPUs, asynchronously, with slime's train_async.py in a Ray job. Two
# nodes train (tensor 4 x pipeline 2 x context 2). Two nodes sample one rollout ahead, with four SGLang engines of four
# GPUs each.
#
# slime_ext is the one flag in CORRECTION_ARGS below. Without it, this is a script for slime alone. The file that the
# flag names measures, and does not change the loss. It also names slime_ext.host.init, which checks this configuration
# before a model is built. Once slime-ext analyze has said what the run needs, name another file of configs/modes.
#
# Before you start:
# - put the checkpoints and prompts named below into BASE_FOLDER, on a file system that all nodes share;
# - on every node, let SLIME_DIR be a checkout of slime and MEGATRON_DIR one of Megatron-LM;
# - install slime_ext on every node with `pip install -e`, or rely on the PYTHONPATH below;
# - start Ray on the other nodes:
#     ray start --address=${MASTER_ADDR}:6379 --num-gpus 8 --disable-usage-stats
# Check the script first, on any machine:
#     SLIME_DIR=path/to/slime slime-ext check examples/run_slime_multinode.sh --env SLIME_DIR
set -euo pipefail

BASE_FOLDER=${BASE_FOLDER:-/data}
SLIME_DIR=${SLIME_DIR:-/root/slime}
MEGATRON_DIR=${MEGATRON_DIR:-/root/Megatron-LM}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
NODES=${NODES:-4}
EXAMPLES_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
export PYTHONUNBUFFERED=1

# This sets MODEL_ARGS, the shape of the model in Megatron's flags.
source "${SLIME_DIR}/scripts/models/qwen3-32B.sh"

CORRECTION_ARGS=(
   --custom-config-path "${EXAMPLES_DIR}/../configs/modes/metrics_only.yaml"
)

CKPT_ARGS=(
   --hf-checkpoint ${BASE_FOLDER}/Qwen3-32B
   --ref-load ${BASE_FOLDER}/Qwen3-32B_torch_dist
   --load ${BASE_FOLDER}/Qwen3-32B_slime
   --save ${BASE_FOLDER}/Qwen3-32B_slime
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data ${BASE_FOLDER}/dapo-math-17k/dapo-math-17k.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 1000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --global-batch-size 128 # two optimizer steps per rollout
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime ${BASE_FOLDER}/aime-2024/aime-2024.jsonl
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-top-p 1
)

PERF_ARGS=(
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 2
   --context-parallel-size 2
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --entropy-coef 0.0
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
   --optimizer-cpu-offload
   --overlap-cpu-optimizer-d2h-h2d
   --use-precision-aware-optimizer
)

SGLANG_ARGS=(
   --rollout-num-gpus 16
   --rollout-num-gpus-per-engine 4
   --sglang-mem-fraction-static 0.8
)

LOG_ARGS=(
   --use-tensorboard
   --tb-project-name slime_ext
   --tb-experiment-name qwen3-32B
)

MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend flash
)

ray status &>/dev/null || ray start --head --node-ip-address "${MASTER_ADDR}" --num-gpus 8 --disable-usage-stats
until [ "$(ray list nodes --filter state=ALIVE 2>/dev/null | grep -c ALIVE)" -ge "${NODES}" ]; do
   echo "waiting for ${NODES} nodes in the Ray cluster at ${MASTER_ADDR}"
   sleep 5
done

# Every process of the job must find slime, Megatron-LM and slime_ext.
RUNTIME_ENV=$(cat <<JSON
{"env_vars": {
   "PYTHONPATH": "${SLIME_DIR}:${MEGATRON_DIR}:${EXAMPLES_DIR}/..",
   "CUDA_DEVICE_MAX_CONNECTIONS": "1",
   "MASTER_ADDR": "${MASTER_ADDR}",
   "no_proxy": "127.0.0.1,${MASTER_ADDR}"
}}
JSON
)

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${RUNTIME_ENV}" \
   -- python3 "${SLIME_DIR}/train_async.py" \
   --actor-num-nodes 2 \
   --actor-num-gpus-per-node 8 \
   "${MODEL_ARGS[@]}" \
   "${CORRECTION_ARGS[@]}" \
   "${CKPT_ARGS[@]}" \
   "${ROLLOUT_ARGS[@]}" \
   "${EVAL_ARGS[@]}" \
   "${PERF_ARGS[@]}" \
   "${GRPO_ARGS[@]}" \
   "${OPTIMIZER_ARGS[@]}" \
   "${SGLANG_ARGS[@]}" \
   "${LOG_ARGS[@]}" \
   "${MISC_ARGS[@]}"

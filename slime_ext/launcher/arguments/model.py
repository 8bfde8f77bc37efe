"""Flags of the model, of its split over ranks and of its number format. --hf-checkpoint is the model."""

from __future__ import annotations

from slime_ext.launcher.arguments.flags import Flag, integer, number, one_of

AGREE = "; must agree with config.json of --hf-checkpoint"

MODEL = (
    Flag(
        "--hf-checkpoint",
        str,
        required=True,
        help="directory with config.json and the tokenizer; without "
        "weights the model starts from random numbers of --seed",
    ),
    Flag("--num-layers", integer, help="number of transformer layers" + AGREE),
    Flag("--hidden-size", integer, help="width of the residual stream" + AGREE),
    Flag("--ffn-hidden-size", integer, help="width of the feed-forward layer" + AGREE),
    Flag("--num-attention-heads", integer, help="number of query heads" + AGREE),
    Flag("--num-query-groups", integer, help="number of key-value heads" + AGREE),
    Flag("--group-query-attention", help="several query heads share one key-value head" + AGREE),
    Flag("--kv-channels", integer, help="width of one head" + AGREE),
    Flag("--qk-layernorm", help="normalise queries and keys" + AGREE),
    Flag("--swiglu", help="gated SiLU feed-forward" + AGREE),
    Flag("--normalization", one_of("RMSNorm"), help="kind of normalisation" + AGREE),
    Flag("--rotary-base", number, help="base of the rotary embedding" + AGREE),
    Flag("--norm-epsilon", number, help="epsilon of the normalisation" + AGREE),
    Flag("--untie-embeddings-and-output-weights", help="input and output embedding are two tables" + AGREE),
    Flag("--vocab-size", integer, help="rows of the embedding" + AGREE),
    Flag("--padded-vocab-size", integer, help="the same; this launcher adds no padding rows" + AGREE),
    Flag(
        "--transformer-impl",
        one_of("local", "transformer_engine"),
        "transformer_engine",
        help="whose layers; Transformer Engine's need CUDA, without it they are Megatron's local ones",
    ),
    Flag("--init-method-std", number, 0.02, help="standard deviation of random initial weights"),
)

PARALLEL = (
    Flag("--tensor-model-parallel-size", integer, 1, help="ranks that share each layer"),
    Flag("--pipeline-model-parallel-size", integer, 1, help="ranks that share the stack of layers"),
    Flag("--context-parallel-size", integer, 1, help="ranks that share each sequence"),
    Flag("--actor-num-nodes", integer, 1, help="machines that train; this launcher runs on one"),
    Flag(
        "--actor-num-gpus-per-node",
        integer,
        help="training ranks; default tensor x pipeline x context, "
        "what is above that is data parallel (slime's default is 8)",
    ),
    Flag("--distributed-timeout-minutes", integer, 10, help="how long a collective may wait"),
)

PRECISION = (
    Flag("--bf16", help="train in bfloat16 (CUDA)"),
    Flag("--fp16", help="train in float16 (CUDA)"),
    Flag(
        "--params-dtype",
        one_of("float32", "float64"),
        "float32",
        help="type of weights and arithmetic without --bf16 or --fp16; ours",
    ),
)

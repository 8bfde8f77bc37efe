"""Flags that slime or Megatron has and this launcher does not act on: the one table of them.

Three kinds: `NO_EFFECT` is accepted with a note (placement, memory and logging services, which change
no number here), `FIXED` is accepted with the value that this launcher has built in, `REFUSED` is an error
that says so.
"""

from __future__ import annotations

from slime_ext.errors import ConfigError, did_you_mean

NO_EFFECT = frozenset(
    """
    accumulate-allreduce-grads-in-fp32 attention-backend attention-softmax-in-fp32 balance-by-flops
    balance-data colocate disable-wandb-random-suffix log-correct-samples log-interval log-multi-turn
    log-passrate log-probs-chunk-size log-probs-max-tokens-per-gpu make-vocab-size-divisible-by
    max-position-embeddings no-bias-swiglu-fusion no-gradient-accumulation-fusion no-masked-softmax-fusion
    no-offload-rollout no-offload-train no-persist-layer-norm no-rope-fusion num-gpus-per-node offload
    offload-rollout offload-train optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce
    overlap-param-gather recompute-activations recompute-granularity recompute-method recompute-num-layers
    rollout-health-check-first-wait rollout-health-check-interval rollout-health-check-timeout
    rollout-num-gpus rollout-num-gpus-per-engine seq-length sequence-parallel tokenizer-model tokenizer-type
    train-env-vars update-weight-buffer-size use-distributed-optimizer use-fault-tolerance use-flash-attn
    use-precision-aware-optimizer use-wandb wandb-always-use-train-step wandb-dir wandb-group wandb-host
    wandb-key wandb-mode wandb-project wandb-run-id wandb-team
    """.split()
)

FIXED: dict[str, tuple[str, ...]] = {
    "attention-dropout": ("0.0", "0"),
    "disable-bias-linear": (),
    "expert-model-parallel-size": ("1",),
    "expert-tensor-parallel-size": ("1",),
    "hidden-dropout": ("0.0", "0"),
    "kl-coef": ("0.0", "0", "0.00"),
    "kl-loss-coef": ("0.0", "0", "0.00"),
    "loss-type": ("policy_loss",),
    "optimizer": ("adam",),
    "position-embedding-type": ("rope",),
    "rotary-percent": ("1.0", "1"),
    "train-backend": ("megatron",),
    "update-weight-mode": ("full",),
    "use-rotary-position-embeddings": (),
}

SLIME = frozenset(
    """
    allgather-cp apply-chat-template apply-chat-template-kwargs async-save balance-by-flops balance-data
    buffer-filter-path check-weight-update-equal ci-disable-kl-checker ci-load-grad-norm ci-save-grad-norm
    ci-test ci-train-rollout-logprob-abs-diff-threshold colocate custom-advantage-function-path
    custom-convert-samples-to-train-data-path custom-eval-rollout-log-function-path
    custom-generate-function-path custom-loss-function-path custom-megatron-before-log-prob-hook-path
    custom-model-provider-path custom-reward-post-process-path custom-update-weight-post-write-path
    data-pad-size-multiplier data-source-path debug-rollout-only debug-train-only
    disable-compute-advantages-and-returns disable-rollout-global-dataset disable-wandb-random-suffix
    dynamic-sampling-filter-path enable-mtp-training eval-config eval-function-path eval-max-context-len
    eval-max-prompt-len eval-min-new-tokens eval-tool-key fetch-trajectory-retry-times freeze-indexer
    freeze-params-name-list gamma group-rm http-proxy keep-old-actor kl-coef kl-loss-coef kl-loss-type lambd
    load-debug-rollout-data load-debug-rollout-data-subsample load-forge-rollout-data log-correct-samples
    log-multi-turn log-passrate log-probs-chunk-size log-probs-max-tokens-per-gpu log-reward-category
    loss-mask-type loss-type mask-offpolicy-in-partial-rollout megatron-config-path
    megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules megatron-deepgemm-moe-forward-layers
    megatron-deepgemm-moe-forward-modules memory-recorder memory-snapshot-dir memory-snapshot-num-steps
    min-batch-collection-ratio model-name mtp-loss-scaling-factor mtp-num-layers multimodal-keys
    num-critic-only-steps num-gpus-per-node offload offload-rollout offload-train
    only-train-params-name-list opd-kl-coef opd-teacher-ckpt-step opd-teacher-load opd-type opsm-delta
    over-sampling-batch-size partial-rollout profile-target qwen-gdn-backend record-memory-history
    ref-ckpt-step ref-load ref-update-interval release-train reset-optimizer-states rm-url
    rollout-all-samples-process-path rollout-buffer-url rollout-data-transport rollout-external-engine-addrs
    rollout-function-path rollout-health-check-first-wait rollout-health-check-interval
    rollout-health-check-timeout rollout-num-gpus rollout-num-gpus-per-engine rollout-sample-filter-path
    rollout-sample-hook-path rollout-skip-special-tokens rollout-stop rollout-task-type save-hf
    start-rollout-id tool-key train-backend train-env-vars update-weight-buffer-size
    update-weight-delta-checksum update-weight-delta-encoding update-weight-disk-dir
    update-weight-disk-keep-files update-weight-local-checkpoint-dir update-weight-mode
    update-weight-transport use-distributed-post use-fault-tolerance use-kl-loss use-opd use-opsm
    use-rollout-entropy use-rollout-routing-replay use-routing-replay use-stateless-adam use-unbiased-kl
    use-wandb value-clip wandb-always-use-train-step wandb-dir wandb-group wandb-host wandb-key wandb-mode
    wandb-project wandb-run-id wandb-team
    """.split()
)

MEGATRON = frozenset(
    """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
    accumulate-allreduce-grads-in-fp32 activation-func-clamp-value add-qkv-bias adlr-autoresume
    adlr-autoresume-interval allow-ambiguous-pad-tokens app-tag-run-name app-tag-run-version
    apply-layernorm-1p apply-query-key-layer-scaling apply-residual-connection-post-layernorm
    apply-wd-to-qk-layernorm attention-backend attention-dropout attention-softmax-in-fp32
    auto-detect-ckpt-format batch-size bert-embedder-type bert-load bert-no-binary-head
    biencoder-projection-dim biencoder-shared-query-context-model block-data-path cache-mla-latents
    calc-ft-timeouts check-for-large-grads check-for-spiky-loss
    check-weight-hash-across-dp-replicas-interval checkpoint-activations ckpt-assume-constant-structure
    ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format ckpt-format
    ckpt-fully-parallel-load ckpt-fully-parallel-save ckpt-step classes-fraction config-logger-dir
    cp-comm-type create-all-gather-group cross-entropy-fusion-impl cross-entropy-loss-fusion cuda-graph-impl
    cuda-graph-scope cuda-graph-warmup-steps data-args-path data-cache-path data-parallel-random-init
    data-parallel-sharding-strategy data-path data-per-class-fraction dataloader-defer-npy-index-mmap
    dataloader-fast-cache-load dataloader-type ddp-average-in-collective ddp-bucket-size ddp-num-buckets
    ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation decode-only-cuda-graphs
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers decoder-num-layers decoder-seq-length
    decoupled-lr decoupled-min-lr decrease-batch-size-if-needed defer-embedding-wgrad-compute
    delay-wgrad-compute deterministic-mode dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size
    dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp
    dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs disable-bf16-reduced-precision-matmul
    disable-bias-linear disable-chunked-prefill disable-gloo-process-groups disable-jit-fuser
    disable-mamba-mem-eff-path disable-msc disable-straggler-on-startup disable-symmetric-registration
    disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag
    disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs dist-ckpt-format
    dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness
    distrib-optim-fully-reshardable-mem-efficient distribute-saved-activations
    distributed-timeout-seconds-after-init dump-param-to-param-group-map embedding-init-method-std
    embedding-path empty-unused-memory-level enable-chunked-prefill enable-cuda-graph enable-experimental
    enable-ft-package enable-full-sharding-in-hsdp encoder-num-layers encoder-seq-length end-weight-decay
    eod-mask-loss error-injection-rate error-injection-type eval-iters evidence-data-path
    exit-duration-in-mins exit-interval exit-on-missing-checkpoint exit-signal-handler exp-avg-dtype
    exp-avg-sq-dtype expert-model-parallel-size expert-tensor-parallel-size external-cuda-graph
    fake-process-group fim-data fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token
    fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token finetune first-last-layers-bf16
    flash-decode fp16-lm-cross-entropy fp32-residual-connection fp4-format fp4-param-gather fp4-recipe
    fp8-amax-compute-algo fp8-amax-history-len fp8-format fp8-interval fp8-margin fp8-param-gather
    fp8-recipe fsdp-double-buffer fsdp-manual-registration ft-num-warmup-iters full-validation
    glu-linear-offset grad-reduce-in-bf16 grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-default-temperature
    grpo-default-top-p grpo-entropy-term-weight grpo-filter-groups-with-same-reward grpo-group-size
    grpo-iterations grpo-kl-beta grpo-prompts-per-step head-lr-mult heterogeneous-layers-config-encoded-json
    heterogeneous-layers-config-path hidden-dropout hierarchical-context-parallel-sizes
    high-priority-stream-groups hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern hysteresis
    ict-head-size ict-load img-h img-w indexer-batch-size indexer-log-interval
    inference-batch-times-seqlen-threshold inference-coordinator-port inference-dynamic-batching
    inference-dynamic-batching-block-size inference-dynamic-batching-buffer-guaranteed-fraction
    inference-dynamic-batching-buffer-overflow-factor inference-dynamic-batching-buffer-size-gb
    inference-dynamic-batching-cuda-graph-max-tokens
    inference-dynamic-batching-cuda-graph-mixed-prefill-count inference-dynamic-batching-max-requests
    inference-dynamic-batching-max-requests-override inference-dynamic-batching-max-tokens
    inference-dynamic-batching-max-tokens-override inference-dynamic-batching-num-cuda-graphs
    inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-track-paused-request-events
    inference-dynamic-batching-unified-memory-level inference-logging-step-interval inference-max-batch-size
    inference-max-requests inference-max-seq-length inference-rng-tracker inference-wandb-logging
    init-method-xavier-uniform init-model-with-meta-device initial-loss-scale inprocess-active-world-size
    inprocess-barrier-timeout inprocess-completion-timeout inprocess-empty-cuda-cache inprocess-granularity
    inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout inprocess-last-call-wait
    inprocess-max-iterations inprocess-monitor-process-interval inprocess-monitor-thread-interval
    inprocess-progress-watchdog-interval inprocess-restart inprocess-soft-timeout
    inprocess-termination-grace-time is-hybrid-model iter-per-epoch iterations-to-skip
    keep-fp8-transpose-cache kitchen-config-file kitchen-recipe-number kv-lora-rank langrl-env-config
    langrl-external-server langrl-inference-server-conversation-template langrl-inference-server-type
    lazy-mpu-init legacy-tokenizer linear-attention-freq load-main-params-from-ckpt local-rank log-energy
    log-interval log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress log-straggler
    log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard
    logging-level loss-scale loss-scale-window lr-decay-samples lr-warmup-fraction lr-warmup-init
    lr-warmup-samples lr-wsd-decay-iters lr-wsd-decay-samples lr-wsd-decay-style main-grads-dtype
    main-params-dtype make-vocab-size-divisible-by mamba-head-dim mamba-num-groups mamba-num-heads
    mamba-state-dim manual-gc manual-gc-interval mask-factor mask-prob mask-type max-position-embeddings
    max-tokens-to-oom memory-snapshot-path merge-file microbatch-group-size-per-virtual-pipeline-stage
    mid-level-dataset-surplus min-loss-scale mlp-chunks-for-prefill mock-data model-parallel-size
    moe-apply-probs-on-input moe-aux-loss-coeff moe-deepep-num-sms moe-enable-deepep
    moe-expert-capacity-factor moe-extended-tp moe-ffn-hidden-size moe-grouped-gemm moe-input-jitter-eps
    moe-layer-freq moe-layer-recompute moe-pad-expert-input-to-capacity
    moe-pad-experts-for-cuda-graph-inference moe-per-layer-logging moe-permute-fusion
    moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias
    moe-router-force-load-balancing moe-router-fusion moe-router-group-topk moe-router-load-balancing-type
    moe-router-num-groups moe-router-padding-for-fp8 moe-router-pre-softmax moe-router-score-function
    moe-router-topk moe-router-topk-scaling-factor moe-shared-expert-intermediate-size
    moe-shared-expert-overlap moe-token-dispatcher-type moe-token-drop-policy moe-upcycling-granularity
    moe-use-legacy-grouped-gemm moe-use-upcycling moe-z-loss-coeff mrope-section mscale mscale-all-dim
    multi-latent-attention multiple-validation-sets muon-extra-scale-factor muon-fp32-matmul-prec
    muon-momentum muon-no-split-qkv muon-num-ns-steps muon-scale-mode muon-tp-mode muon-use-nesterov
    nccl-all-reduce-for-prefill nccl-communicator-config-path no-align-grad-reduce no-align-param-gather
    no-async-tensor-model-parallel-allreduce no-barrier-with-level-1-timing no-bias-dropout-fusion
    no-bias-gelu-fusion no-bias-swiglu-fusion no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save
    no-clone-scatter-output-in-embedding no-create-attention-mask-in-dataloader no-data-sharding
    no-fp8-wgrad no-gradient-accumulation-fusion no-gradient-reduce-div-fusion no-initialization
    no-load-optim no-load-rng no-log-loss-scale-to-tensorboard no-manual-gc-eval no-masked-softmax-fusion
    no-mmap-bin-files no-one-logger no-overlap-p2p-communication no-persist-layer-norm no-pin-cpu-grads
    no-pin-cpu-params no-position-embedding no-rope-freq no-rope-fusion no-save-rng
    no-scatter-gather-tensors-in-pipeline no-strict-fsdp-dtensor-load
    no-use-tokenizer-model-from-checkpoint-args no-weight-decay-cond-type non-persistent-ckpt-type
    non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir
    non-persistent-save-interval num-channels num-classes num-dataset-builder-threads
    num-distributed-optimizer-instances num-experts num-layers-at-end-in-bf16 num-layers-at-start-in-bf16
    num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank num-workers
    object-storage-cache-path one-logger-async one-logger-project one-logger-run-name onnx-safe openai-gelu
    optimizer optimizer-cpu-offload optimizer-offload-fraction outer-dp-sharding-strategy
    output-bert-embeddings overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce
    overlap-moe-expert-parallel-comm overlap-p2p-communication-warmup-flush overlap-param-gather
    overlap-param-gather-with-optimizer-step override-opt-param-scheduler patch-dim
    per-dataset-sequences-path per-split-data-args-path perform-rl-step persistent-save-interval
    phase-transition-iterations pipeline-model-parallel-comm-backend pipeline-model-parallel-layout
    position-embedding-type pretrained-checkpoint profile profile-ranks profile-step-end profile-step-start
    q-lora-rank qk-head-dim qk-l2-norm qk-pos-emb-head-dim query-in-block-prob quick-geglu rampup-batch-size
    recompute-activations recompute-granularity recompute-method recompute-modules recompute-num-layers
    refit-method relative-attention-max-distance relative-attention-num-buckets replication
    replication-factor replication-jump rerun-mode reset-attention-mask reset-position-ids
    result-rejected-tracker-filename retriever-report-topk-accuracies retriever-score-scaling
    retriever-seq-length retro-add-retriever retro-attention-gate retro-cyclic-train-iters
    retro-encoder-attention-dropout retro-encoder-hidden-dropout retro-encoder-layers
    retro-no-verify-neighbor-count retro-num-neighbors retro-num-retrieved-chunks retro-project-dir
    reuse-grad-buf-for-mxfp8-param-ag rl-calculate-intra-group-similarity rl-default-temperature
    rl-default-top-k rl-default-top-p rl-importance-sampling-truncation-coef
    rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
    rl-inference-logprobs-is-correction rl-inference-model-unified-memory-level
    rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size
    rl-offload-inference-model-weights-when-idle rl-offload-kv-cache-during-training
    rl-offload-optimizer-during-inference rl-parallel-generation-tasks rl-partial-rollouts
    rl-prompts-per-eval rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-sequence-packing-algo
    rl-sequence-packing-bin-size rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token
    rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap rope-scaling-factor
    rope-type rotary-interleaved rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor
    run-workload-inspector-server sample-rate save-retain-interval seq-length sequence-parallel sft
    sft-tokenizer-prompt-format sgd-momentum sharp-enabled-group short-seq-prob skip-train softmax-type spec
    split squared-relu start-weight-decay straggler-ctrlr-port straggler-minmax-count
    suggested-communication-unit-size swin-backbone-type symmetric-ar-type te-precision-config-file
    te-rng-tracker tensorboard-dir tensorboard-log-interval tensorboard-queue-size test-data-path test-mode
    tiktoken-num-special-tokens tiktoken-pattern tiktoken-special-tokens timing-log-level timing-log-option
    titles-data-path tokenizer-hf-include-special-tokens tokenizer-hf-use-fast tokenizer-metadata
    tokenizer-model tokenizer-sentencepiece-legacy tokenizer-special-tokens tokenizer-type
    torch-fsdp2-no-reshard-after-forward tp-comm-bootstrap-backend tp-comm-overlap tp-comm-overlap-cfg
    tp-comm-overlap-rs-dgrad train-data-path train-iters train-samples train-sync-interval 
    trust-remote-code use-checkpoint-args use-checkpoint-opt-param-scheduler use-cpu-initialization
    use-dist-ckpt use-distributed-optimizer use-flash-attn use-fused-weighted-squared-relu use-legacy-models
    use-legacy-static-engine use-mcore-models use-megatron-fsdp use-mp-args-from-checkpoint-args use-nccl-ub
    use-one-sent-docs use-persistent-ckpt-worker use-precision-aware-optimizer use-pytorch-profiler
    use-ring-exchange-p2p use-rope-scaling use-rotary-position-embeddings use-sharp use-te-activation-func
    use-torch-fsdp2 use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping v-head-dim valid-data-path
    vision-backbone-type vision-pretraining vision-pretraining-type vocab-extra-ids vocab-file wandb-entity
    wandb-exp-name wandb-save-dir warmup weight-decay-incr-style wgrad-deferral-limit window-attn-skip-freq
    window-size yaml-cfg
    """.split()
)

REFUSED = (SLIME | MEGATRON) - NO_EFFECT - set(FIXED)


def reject_unknown(token: str, known: list[str]) -> None:
    """Raises the one line that fits `token`, which the parser could not place.

    Raises:
        ConfigError: always.
    """
    name = token.split("=")[0]
    bare = name.lstrip("-").replace("_", "-")
    if not name.startswith("-"):
        raise ConfigError(f"command line: expected a flag, got '{token}': a value without a flag before it")
    if bare in REFUSED and name.startswith("--"):
        raise ConfigError(
            f"{name}: expected a flag that this launcher implements, got one that only {_owner(bare)} "
            "does: remove it, or train with slime"
        )
    near = did_you_mean(f"--{bare}", known) or did_you_mean(f"--{bare}", [f"--{n}" for n in REFUSED])
    raise ConfigError(
        f"{name}: expected a known flag, got an unknown one{near or ': see slime-ext train --help'}"
    )


def _owner(bare: str) -> str:
    return "slime" if bare in SLIME else "Megatron"


def note_no_effect(flags: list[str]) -> list[str]:
    """One line for the accepted flags that change nothing here; none for none."""
    return [f"{', '.join(flags)}: no effect here"] if flags else []


def check_fixed(bare: str, values: list[str]) -> None:
    """Raises ConfigError unless `values` is what this launcher has built in."""
    allowed = FIXED[bare]
    right = len(values) == 1 and values[0] in allowed if allowed else not values
    if right:
        return
    wanted = allowed[0] if allowed else "no value"
    raise ConfigError(
        f"--{bare}: expected {wanted}, got {' '.join(values) or 'nothing'}: this launcher has only that"
    )

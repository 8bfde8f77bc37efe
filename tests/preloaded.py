"""Imports what ranks need once, in the server that they are forked from."""

import os

from slime_ext.tools.collection import importing

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # read where Megatron decorates; each rank would prepare to compile
with importing("torch"):  # a fork would visit all these objects again and again
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.pipeline_parallel
    import pytest
    import ray
    import torch
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe

    import slime_ext.tis
    import slime_ext_cpu.stand_ins.layers

__all__ = ["megatron", "pytest", "ray", "slime_ext", "slime_ext_cpu", "torch", "transformers"]

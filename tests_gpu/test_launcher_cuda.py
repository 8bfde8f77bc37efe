"""The trainer on one CUDA device: log-probs, the model against transformers, Megatron's optimizer.

Skips without CUDA, megatron-core or transformers. One device holds one NCCL rank: layouts are tested on gloo.
"""

from __future__ import annotations

import copy
import zlib

import pytest
import torch

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from slime_ext.errors import ConfigError  # noqa: E402
from slime_ext.launcher.megatron import log_probs, model, optimizer, parallel, shims, weights  # noqa: E402
from tests.launcher.megatron.tiny_model import tiny_args  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SEQUENCES = [[3, 4, 5, 6, 7, 8, 9], [40, 2, 9], list(range(20, 44))]
IMPLEMENTATIONS = [
    "local",
    pytest.param("transformer_engine", marks=pytest.mark.skipif(not HAVE_TE, reason="no TE")),
]


def _args(dtype=torch.bfloat16, **more):
    return tiny_args(dtype=dtype, lr=1e-3, **more)


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory):
    parallel.initialize(_args(), f"file://{tmp_path_factory.mktemp('store')}/store")
    yield
    parallel.destroy()


@pytest.fixture(scope="module")
def oracle():
    """transformers' Qwen3 in float32 on the device, norms drawn too."""
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        rope_theta=5000.0,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    reference = (
        transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").float().cuda().eval()
    )
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            noise = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
            )
            parameter.copy_(noise * 0.05 + (1 if "norm" in name else 0))
    return reference


def _build(oracle, **more):
    state = {name: p.detach().cpu() for name, p in oracle.named_parameters()}
    return model.build_model(_args(**more), oracle.config, state.__getitem__)


def _packed():
    ends = torch.tensor([0, *(len(s) for s in SEQUENCES)]).cumsum(0).int().cuda()
    longest = max(map(len, SEQUENCES))
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    return torch.tensor([sum(SEQUENCES, [])], device="cuda"), params  # noqa: RUF017


def _targets():
    return torch.tensor(sum(([*s[1:], 0] for s in SEQUENCES), []), device="cuda")  # noqa: RUF017


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)], ids=str
)
def test_log_probs_are_those_of_the_cpu(dtype, tolerance, temperature):
    logits = (torch.randn(50, 300, dtype=torch.float64) * 4).to(dtype)
    targets = torch.randint(0, 300, (50,))
    expected = (logits.double() / temperature).log_softmax(-1)
    chosen, entropy = log_probs.log_probs_and_entropy(logits.cuda(), targets.cuda(), temperature)
    torch.testing.assert_close(
        chosen.cpu().double(), expected.gather(-1, targets[:, None])[:, 0], rtol=0, atol=tolerance
    )
    torch.testing.assert_close(
        entropy.cpu().double(), -(expected.exp() * expected).sum(-1), rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_log_probs_of_the_model_are_those_of_transformers(oracle, implementation):
    ids, params = _packed()
    chunks = _build(oracle, transformer_impl=implementation)
    with torch.no_grad():
        logits = chunks[0](ids, None, None, packed_seq_params=params)[0]
        found, _ = log_probs.log_probs_and_entropy(logits, _targets())
        rows = torch.cat([oracle(torch.tensor([s], device="cuda")).logits[0] for s in SEQUENCES])
    expected = rows.double().log_softmax(-1).gather(-1, _targets()[:, None])[:, 0]
    assert (found.double() - expected).abs().mean() < 2e-2  # bfloat16 against float32


def test_local_layers_in_float32_are_those_of_transformers(oracle):
    ids, params = _packed()
    chunks = _build(oracle, dtype=torch.float32, transformer_impl="local")
    with torch.no_grad():
        found = chunks[0](ids, None, None, packed_seq_params=params)[0]
        expected = torch.cat([oracle(torch.tensor([s], device="cuda")).logits[0] for s in SEQUENCES])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_return_as_they_came(oracle, implementation):
    state = weights.gather_hf_state(_build(oracle, transformer_impl=implementation), oracle.config)
    expected = dict(oracle.named_parameters())
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name].detach().cpu().bfloat16()) for name in expected)


def _step(chunks, adam):
    def forward(iterator, chunk):
        ids, params = next(iterator)
        logits = chunk(ids, None, None, packed_seq_params=params)

        def loss(out):
            value = -log_probs.log_probs_and_entropy(out[0], _targets())[0].mean()
            return value, {"loss": value.detach().clone()}

        return logits, loss

    adam.zero_grad()
    [report] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter([_packed()]),
        model=chunks,
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return report["loss"].item(), *adam.step()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_distributed_optimizer_learns(oracle, implementation):
    chunks = _build(oracle, transformer_impl=implementation)
    adam = optimizer.build_optimizer(_args(), chunks)
    steps = [_step(chunks, adam) for _ in range(10)]
    assert all(updated and norm > 0 for _, updated, norm in steps)
    assert steps[-1][0] < 0.8 * steps[0][0]


def test_a_loaded_optimizer_state_continues(oracle):
    chunks = _build(oracle, transformer_impl="local")
    adam = optimizer.build_optimizer(_args(), chunks)
    _step(chunks, adam)
    state, tensors = copy.deepcopy(adam.state_dict()), weights.gather_hf_state(chunks, oracle.config)
    straight = _step(chunks, adam)
    weights.load_hf_state(chunks, tensors.__getitem__, oracle.config)
    again = optimizer.build_optimizer(_args(), chunks)
    again.load_state_dict(state)
    assert _step(chunks, again) == pytest.approx(straight, rel=1e-3)


def test_cpu_shims_are_refused():
    with pytest.raises(ConfigError, match="expected a machine without CUDA"):
        shims.install()

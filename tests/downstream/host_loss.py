"""A host's own ``loss_function`` on one rank of a layout, on a batch cut from the same samples everywhere.

The host's modules are the real ones; packages whose ``__init__`` pulls in engines are entered without running
it, and where ray is not installed an empty module of that name stands in (``slime.utils.misc`` imports it for
functions that the loss never calls). Functions that run on ranks import Megatron themselves: the server that
ranks are forked from has it, and the tests that import this file don't wait 5 s for it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.util
import io
import sys
import tempfile
import types
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slime_ext.host import step_metrics, train_step, wrapping
from slime_ext.hosts import contract
from slime_ext.hosts.code import LOSS, TARGET
from slime_ext.hosts.contract import INIT_FLAG
from tests.downstream.drift import Tree

VOCAB, PAD = 32, 8
PADDED = 48  # what --qkv-format bshd pads every sample to
# (total, response): ragged; one response of length 1; two siblings; a long prompt, so that a context-parallel
# rank holds nothing of its response.
SHAPES = [(12, 7), (9, 1), (18, 12), (8, 5), (15, 9), (11, 4), (31, 3), (6, 5)]
ROLLOUT_IDS = [0, 1, 2, 3, 4, 4, 5, 6]
HEAD, TOPK = 4, ("rollout_topk_token_ids", "rollout_topk_log_probs")  # of the sampler, for score centering
MASKED_OUT, WITH_NAN, MASKED_AT, VALID_AT = 3, 2, 2, 1
DEFAULTS = {
    "loss_type": "policy_loss",
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "eps_clip_c": None,
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "entropy_coef": 0.0,
    "use_rollout_logprobs": False,
    "use_rollout_entropy": False,
    "use_unbiased_kl": False,
    "use_tis": True,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": "slime_ext.tis.correct",
    "get_mismatch_metrics": False,
    "custom_pg_loss_reducer_function_path": None,
    "n_samples_per_prompt": 2,
    "use_opsm": False,
    "use_opd": False,
    "use_critic": False,
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "use_rollout_top_p_replay": False,
    "log_probs_chunk_size": -1,
    "allgather_cp": False,
    "qkv_format": "thd",
    "global_batch_size": len(SHAPES),
    "use_dynamic_global_batch_size": False,
    "true_on_policy_mode": False,
    # miles
    "skip_actor_forward_only": False,
    "observe_training_entropy": False,
    "dump_details": None,
}


@dataclass(frozen=True)
class Layout:
    """How many ranks of what; ``flags`` go to every case.

    Args:
        vpp: chunks of the model on each pipeline stage, which each have an iterator of their own.
        backwards: the samples of a rank in the other order.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    micro_batches: int = 1
    backwards: bool = False
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """What Megatron's groups are made from; layouts of one shape can share their processes."""
        return self.tp, self.cp, self.pp, self.dp, self.vpp

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


@dataclass(frozen=True)
class Case:
    """One loss: a correction, flags, and where a log-prob is NaN (behavior or proximal, masked or valid)."""

    correction: dict[str, Any] | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    nan: tuple[str, str] | None = None
    init: str | None = "slime_ext.host.init"


def one(
    args: Namespace, batch: Any, logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of 1: what loss_function makes of it is the factor that it scales by."""
    return logits.sum() * 0 + 1, {"loss": torch.ones(())}


def measure(
    name: str, folder: str, jobs: list[tuple[Layout, list[Case]]]
) -> list[list[dict[str, Any]]] | None:
    """Loss and gradient norm over all ranks, and the host's metrics, of every case; None off rank 0.

    Args:
        jobs: cases in layouts of one shape.
    """
    from megatron.core import mpu

    torch._dynamo.config.disable = True
    tp, cp, pp, _, vpp = jobs[0][0].shape
    mpu.initialize_model_parallel(tp, pp, vpp if vpp > 1 else None, context_parallel_size=cp)
    host = loaded(name, folder)
    host.join()
    with contextlib.redirect_stdout(io.StringIO()):  # one line per case from host.init
        found = [[_measured(host, layout, case) for case in cases] for layout, cases in jobs]
    return found if dist.get_rank() == 0 else None


def _measured(host: Any, layout: Layout, case: Case) -> dict[str, Any]:
    args = Namespace(**DEFAULTS, slime_ext=case.correction)
    vars(args).update(layout.flags | case.flags)
    if case.init:
        contract.load_function(case.init, INIT_FLAG)(args)
    else:  # of a case before
        wrapping.unwrap(host.module, LOSS, TARGET)
    try:
        return _summed(args, host, layout, case)
    except Exception as error:  # what a wrong input must lead to is a measurement too
        if layout.ranks > 1:
            raise
        return {"error": f"{type(error).__name__}: {error}"}


def _summed(args: Namespace, host: Any, layout: Layout, case: Case) -> dict[str, Any]:
    from megatron.core import mpu

    total = torch.zeros(2, dtype=torch.float64)
    logs: list[dict[str, Any]] = []
    mine = samples(case.nan)[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
    mine = mine[::-1] if layout.backwards else mine
    parts = [mine[i :: layout.micro_batches] for i in range(layout.micro_batches)]
    step = _step(args, host, mine, parts, layout.vpp) if case.init else contextlib.nullcontext()
    with step as step:
        for part in parts if mpu.is_pipeline_last_stage() else ():
            logits = host.logits(args, part)
            loss, _, log = host.loss(args, host.batch(args, part), len(parts), logits)
            scale = host.loss(_as_one(args), host.batch(args, part), len(parts), logits.detach())[0]
            loss.backward()
            logs.append(log)
            total += torch.stack(
                [loss.detach().double() / scale / layout.tp, (logits.grad.double() / scale).square().sum()]
            )
    dist.all_reduce(total)
    ours = step.reduce()[0] if case.init and mpu.is_pipeline_last_stage() else {}
    metrics = _metrics(logs, layout)
    return {"loss": float(total[0]), "gradient": float(total[1].sqrt()), "metrics": metrics, "ours": ours}


def _step(args: Namespace, host: Any, mine: list[Sample], parts: list[list[Sample]], chunks: int) -> Any:
    """What our train step does before the host's: its own iterators, read ahead and put back."""
    data = host.rollout_data(args, mine)
    place = {id(s): i for i, s in enumerate(mine)}
    indices = [[place[id(s)] for s in part] for part in parts]
    iterators = [host.iterator(data, micro_batch_indices=indices) for _ in range(chunks)]
    call = {
        "args": args,
        "rollout_id": 0,
        "step_id": 0,
        "data_iterator": iterators,
        "num_microbatches": len(parts),
    }
    reporter = train_step.Reporter(args)
    opened = train_step._opened(call, reporter.setup.hook_correction, reporter)
    assert [iterator.offset for iterator in iterators] == [0] * chunks
    return step_metrics.under_way(opened)


def _as_one(args: Namespace) -> Namespace:
    values = {"loss_type": "custom_loss", "custom_loss_function_path": f"{__name__}.one"}
    return Namespace(**{**vars(args), **values, "recompute_loss_function": False})


def _metrics(logs: list[dict[str, Any]], layout: Layout) -> dict[str, float]:
    """The host's own reduction: SUM over data and context parallel, by the number of rollouts."""
    from megatron.core import mpu

    if not logs or layout.flags.get("calculate_per_token_loss"):
        return {}
    values = torch.stack([log["values"].double() for log in logs]).sum(0)
    dist.all_reduce(values, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return dict(zip(logs[0]["keys"], (values[1:] / len(set(ROLLOUT_IDS))).tolist(), strict=True))


@dataclass(frozen=True)
class Sample:
    """One sample, whole: logits [total, V], log-probs and mask [R]; the sampler's likeliest tokens."""

    index: int
    total: int
    response: int
    tokens: Tensor
    logits: Tensor
    proximal: Tensor
    behavior: Tensor
    mask: Tensor
    advantage: Tensor
    mask_sum: Tensor
    head_ids: Tensor  # [R, HEAD]
    head: Tensor


def samples(nan: tuple[str, str] | None = None, seed: int = 0) -> list[Sample]:
    """The same samples on every rank: stale by 0.1 nats, mismatched by 0.3, tool tokens, one masked out.

    Each call makes tensors anew, because a host may write into them.
    """

    def own(sample: Sample) -> Sample:
        return Sample(*(v.clone() if isinstance(v, Tensor) else v for v in vars(sample).values()))

    return [own(sample) for sample in _drawn(nan, seed)]


@functools.cache
def _drawn(nan: tuple[str, str] | None, seed: int) -> list[Sample]:
    draw, made = torch.Generator().manual_seed(seed), []
    masks = [_mask(i, response) for i, (_, response) in enumerate(SHAPES)]
    sums = [
        sum(int(m.sum()) for m, r in zip(masks, ROLLOUT_IDS, strict=True) if r == own) for own in ROLLOUT_IDS
    ]
    for i, (total, response) in enumerate(SHAPES):
        tokens = torch.randint(0, VOCAB, (total,), generator=draw)
        logits = torch.randn(total, VOCAB, generator=draw) * 1.5
        before = logits + 0.1 * torch.randn(total, VOCAB, generator=draw)
        made_by = slice(total - response - 1, total - 1)
        sampler = before.log_softmax(-1)[made_by]
        proximal = sampler.gather(1, tokens[-response:, None])[:, 0]
        behavior = proximal + 0.3 * torch.randn(response, generator=draw)
        if nan and i == WITH_NAN:
            at = MASKED_AT if nan[1] == "masked" else VALID_AT
            (behavior if nan[0] == "behavior" else proximal)[at] = torch.nan
        advantage = torch.randn((), generator=draw).expand(response).clone()
        whole = (i, total, response, tokens, logits, proximal, behavior, masks[i], advantage)
        head, ids = sampler.topk(HEAD)
        made.append(Sample(*whole, torch.tensor(float(sums[i])), ids, head))
    return made


def _mask(i: int, response: int) -> Tensor:
    mask = torch.ones(response, dtype=torch.int)
    mask[MASKED_AT : MASKED_AT + 2] = int(response < 7)
    return mask * int(i != MASKED_OUT)


def enter(folder: str, packages: tuple[str, ...], absent: tuple[str, ...] = ("ray",)) -> None:
    """Makes packages importable without running their ``__init__``; `absent` may be missing from here."""
    sys.path.insert(0, folder)
    sys.pycache_prefix = str(Path(tempfile.gettempdir(), "slime_ext_pycache"))  # the tree stays as it is
    for name in absent:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(Path(folder, *name.split(".")))]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__spec__.submodule_search_locations = module.__path__
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(importlib.import_module(parent), child, module)


def packages_of(modules: list[str]) -> tuple[str, ...]:
    """The packages that modules lie in, outermost first, without the host's own."""
    found = {m.rsplit(".", i)[0] for m in modules for i in range(1, m.count(".") + 1)}
    return tuple(sorted(found, key=lambda name: (name.count("."), name)))


def iterator_of(tree: Tree) -> Any:
    """The host's class of micro-batches, without the module around it, whose imports need engines."""
    text = tree.texts[tree.iterator]
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    (made,) = (node for node in classes if "def get_next" in ast.unparse(node))
    names: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + ast.unparse(made), names)
    return names[made.name]


class Slime:
    """slime's loss, v0.2.0 to HEAD; its modules are found by what they define."""

    name = "slime"

    def __init__(self, folder: str) -> None:
        tree = Tree(Path(folder).resolve())
        named = ("loss_function", "slice_log_prob_with_cp", LOSS)
        rooms = [found.module for name in named if (found := tree.defining(name))]
        enter(folder, packages_of([*rooms, f"{self.name}.utils.x", f"{self.name}.backends.megatron_utils.x"]))
        self.dispatch, self.cut, self.module = map(importlib.import_module, rooms)
        self.iterator = iterator_of(tree)
        step = types.ModuleType(f"{self.name}.a_step_without_a_model")
        exec("def train_one_step(args, rollout_id, step_id, data_iterator, model): pass", vars(step))
        sys.modules[step.__name__] = step
        assert Path(self.module.__file__).resolve().is_relative_to(tree.folder), self.module.__file__

    @classmethod
    def join(cls) -> None:
        """Tells the host of Megatron's groups, which this one asks itself."""

    def loss(self, args: Namespace, batch: Any, count: int, logits: Tensor) -> Any:
        """What loss_function returns, whose parameters differ from release to release."""
        values = (args, batch, count)
        if "step_global_batch_size" in self.dispatch.loss_function.__code__.co_varnames:
            values = (*values, len(set(ROLLOUT_IDS)))
        return self.dispatch.loss_function(*values, logits)

    def logits(self, args: Namespace, part: list[Sample]) -> Tensor:
        """[1, T, V / tp], or [N, PADDED / cp, V / tp], that the model would hand over on this rank."""
        from megatron.core import mpu

        cp, tp = mpu.get_context_parallel_world_size(), mpu.get_tensor_model_parallel_world_size()
        if args.qkv_format == "bshd":
            local = torch.stack([self.cut.slice_with_cp(s.logits, 0, "bshd", PADDED) for s in part])
        elif args.allgather_cp and cp > 1:
            whole = torch.cat([s.logits for s in part])
            whole = F.pad(whole, (0, 0, 0, -len(whole) % (cp * PAD * tp)))
            local = whole.chunk(cp)[mpu.get_context_parallel_rank()]
        else:
            local = torch.cat([self.cut.slice_with_cp(s.logits, 0) for s in part])
            local = F.pad(local, (0, 0, 0, -len(local) % (PAD * tp)))
        shard = local.chunk(tp, -1)[mpu.get_tensor_model_parallel_rank()]
        return shard.clone().view(-1 if local.dim() == 3 else 1, *shard.shape[-2:]).requires_grad_()

    def rollout_data(self, args: Namespace, mine: list[Sample]) -> dict[str, Any]:
        """This rank's rollout as this release's actor holds it."""
        from megatron.core import mpu

        source = Path(self.dispatch.__file__).read_text()
        batch = self.batch(args, mine)
        data = {key: value for key, value in batch.items() if value is not None}
        sums = torch.stack([s.mask_sum for s in mine])
        for key in ("rollout_mask_sums", "group_mask_sums", *TOPK):
            del data[key]
        positions = [s.index for s in mine]
        data |= {"sample_indices": positions, "rewards": [float(s.advantage[0]) for s in mine]}
        if not mpu.is_pipeline_last_stage():
            del data["log_probs"], data["advantages"]
        for ids, totals in (("rollout_ids", "rollout_mask_sums"), ("group_ids", "group_mask_sums")):
            if totals in source:
                data |= {ids: [ROLLOUT_IDS[p] for p in positions], totals: sums}
        return data

    def batch(self, args: Namespace, part: list[Sample]) -> dict[str, Any]:
        """A micro-batch as the host's actor makes it: masks and lengths whole, all else this rank's slice."""

        padded = ("bshd", PADDED) if args.qkv_format == "bshd" else ()

        def local(name: str) -> list[Tensor]:
            return [
                self.cut.slice_log_prob_with_cp(getattr(s, name), s.total, s.response, *padded).clone()
                for s in part
            ]

        sums = [s.mask_sum for s in part]
        return {
            "unconcat_tokens": [s.tokens for s in part],
            "tokens": [s.tokens for s in part],
            "total_lengths": [s.total for s in part],
            "response_lengths": [s.response for s in part],
            "loss_masks": [s.mask for s in part],
            "rollout_mask_sums": sums,
            "group_mask_sums": sums,  # its name in v0.3.0
            "advantages": local("advantage"),
            "log_probs": local("proximal"),
            "rollout_log_probs": local("behavior"),
            **dict(zip(TOPK, map(local, ("head_ids", "head")), strict=True)),
            "max_seq_lens": [PADDED] * len(part) if padded else None,
            "ref_log_probs": None,
        }


class Miles(Slime):
    """miles' loss; its parallel state is an object of its own."""

    name = "miles"

    @classmethod
    def join(cls) -> None:
        """Tells miles of Megatron's groups, as its actor does."""
        from megatron.core import mpu

        parallel = importlib.import_module("miles.backends.training_utils.parallel")
        info = parallel.GroupInfo
        groups = {
            "intra_dp": mpu.get_data_parallel_group(),
            "intra_dp_cp": mpu.get_data_parallel_group(with_context_parallel=True),
            "cp": mpu.get_context_parallel_group(),
            "tp": mpu.get_tensor_model_parallel_group(),
            "pp": mpu.get_pipeline_model_parallel_group(),
        }
        known = {name: info(rank=g.rank(), size=g.size(), group=g) for name, g in groups.items()}
        names = {field.name for field in dataclasses.fields(parallel.ParallelState)}
        alone = dict.fromkeys({"ep", "etp", "indep_dp"} & names, info(rank=0, size=1, group=None))
        parallel.set_parallel_state(parallel.ParallelState(**known, **alone))

    def loss(self, args: Namespace, batch: Any, count: int, logits: Tensor) -> Any:
        return self.dispatch.loss_function(args, batch, count, logits, apply_megatron_loss_scaling=True)


HOSTS = {"slime": Slime, "miles": Miles}


@functools.cache
def loaded(name: str, folder: str) -> Slime:
    """A host's modules in this process; of all ranks if called before they are forked."""
    return HOSTS[name](folder)

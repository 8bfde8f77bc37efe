"""A decoder transformer of the kind of Qwen3 (RMS norms on queries and keys, optionally a mixture of experts)
or Llama (neither), in which each operation may run in the arithmetic of an engine or of a trainer.

The names of the weights are those of ``transformers``, whose Qwen3ForCausalLM, Qwen3MoeForCausalLM and
LlamaForCausalLM compute the same logits (tests/benchmarks/test_faults.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = dict[str, Tensor]
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
QKV, QK_NORM = "self_attn.qkv_proj.weight", "self_attn.qk_norm.weight"  # see fused


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int = 96
    width: int = 48
    layers: int = 2
    heads: int = 4
    shared: int = 2  # heads of keys and values
    head: int = 16  # size of a head
    inner: int = 96
    experts: int = 0
    active: int = 2
    confidence: float = 2.6  # standard deviation of the logits
    theta: float = 10_000.0  # base of the rotary positions
    eps: float = 1e-6  # added to the mean square in norms


SMOLLM2 = Shape(49_152, 576, 30, 9, 3, 64, 1536, theta=100_000.0, eps=1e-5)


@dataclass(frozen=True)
class How:
    """The arithmetic of one side.

    Args:
        dtype: to which activations are rounded; ``router``: the logits of the router.
        cache: dtype of keys and values; ``cache_from``: absolute position of the first query that reads
        them so.
        bits: of the weights, with one scale for ``group`` columns of a row (0: all); 0 bits for no rounding.
        eps: layer -> added to the mean square in its norms, instead of the shape's.
        native: products of matrices run in ``dtype``; else their results are rounded to it.
        window: positions that a query sees, itself included (0: all).
        stretch: by which rotary positions are divided, as a scaling of the context does.
        soft_cap: of the logits, cap * tanh(z / cap) (0: none).
        phantoms: entries of logit 0 beyond the vocabulary that the log-softmax counts in.
        dropout: share of the outputs of attention and MLP that are zeroed; the others are scaled up.
        sink: logit of an attention sink, which takes a share of each head's softmax (-inf: none).
        routed: factor of what the experts add.
        router_bias: standard deviation of a bias with which experts are chosen, and not weighted.
        logits: dtype of the logits and of their log-sum-exp.
        local_positions: context-parallel ranks, each of which counts rotary positions over its own two
            chunks (0: positions are those of the sequence); for sequences that are computed at once.
        raw_shares: experts are weighted by the router's logits instead of by their softmax.
        neighbours: rotary positions turn neighbouring pairs of a head, by the angles of its two halves.
        sharpness: factor of the attention's scores.
        glu_blocks: rows of a block where gate and up projections are read in alternating blocks (0: as
            halves).
        lost_scores: first position of a key whose scores are 0 for queries that follow a cache (0: none).
        unwritten: in the first of a prompt's two chunks, each query sees the slots of the second chunk too,
            which are still 0.
        jump: added to the rotary positions of tokens that follow a cache.
        verified: tokens of a window that follow a cache, all of which have the position of its first.
        overwritten: first position of queries that see, in every third row of a batch, keys and values of the
            row before in one block of 8 (0: none).
        score_cap: of the attention's scores, cap * tanh(score / cap) (0: none).
        whole_shares: experts are weighted by their share of all experts, not of the chosen ones.
        embedding: factor of the embeddings.
        groups: of experts, of which the ``active`` ones with the largest sum of two shares are chosen before
            experts are (0: none).
        base: factor of the base of the rotary frequencies.
        image: first position, tokens and tokens in a row of an image, whose rows have one rotary position
            each (no tokens: no image).
        jitter: inputs of a mixture are multiplied by numbers between 1 - jitter and 1 + jitter.
        capacity: of an expert, times its even share of a sequence's tokens; later tokens are dropped
            (0: no limit).
    """

    dtype: torch.dtype = FP32
    router: torch.dtype = FP32
    cache: torch.dtype = FP32
    cache_from: int = 0
    bits: int = 0
    group: int = 0
    eps: dict[int, float] = field(default_factory=dict)
    native: bool = False
    window: int = 0
    stretch: float = 1.0
    soft_cap: float = 0.0
    phantoms: float = 0.0
    dropout: float = 0.0
    sink: float = -torch.inf
    routed: float = 1.0
    router_bias: float = 0.0
    logits: torch.dtype = FP32
    local_positions: int = 0
    raw_shares: bool = False
    neighbours: bool = False
    sharpness: float = 1.0
    glu_blocks: int = 0
    lost_scores: int = 0
    unwritten: bool = False
    jump: int = 0
    verified: int = 1
    overwritten: int = 0
    score_cap: float = 0.0
    whole_shares: bool = False
    embedding: float = 1.0
    groups: int = 0
    base: float = 1.0
    image: tuple[int, int, int] = (0, 0, 1)
    jitter: float = 0.0
    capacity: float = 0.0


def random(shape: Shape, generator: torch.Generator) -> Weights:
    """Weights of a policy that is certain of some tokens and not of others."""

    def normal(*size: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator) * gain / size[-1] ** 0.5

    weights = {"model.embed_tokens.weight": normal(shape.vocabulary, shape.width, gain=shape.width**0.5)}
    for i in range(shape.layers):
        weights |= {f"model.layers.{i}.{name}": values for name, values in _layer(shape, normal).items()}
    return weights | {
        "model.norm.weight": torch.ones(shape.width),
        "lm_head.weight": normal(shape.vocabulary, shape.width, gain=shape.confidence),
    }


def _layer(shape: Shape, normal) -> Weights:
    size, inner = shape.width, shape.inner
    weights = {
        "self_attn.q_proj.weight": normal(shape.heads * shape.head, size),
        "self_attn.k_proj.weight": normal(shape.shared * shape.head, size),
        "self_attn.v_proj.weight": normal(shape.shared * shape.head, size),
        "self_attn.o_proj.weight": normal(size, shape.heads * shape.head, gain=0.6),
        "self_attn.q_norm.weight": torch.full((shape.head,), 1.2),
        "self_attn.k_norm.weight": torch.full((shape.head,), 1.2),
        "input_layernorm.weight": torch.ones(size),
        "post_attention_layernorm.weight": torch.ones(size),
    }
    gate, up, down = (inner, size), (inner, size), (size, inner)
    if not shape.experts:
        names = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        return weights | {f"mlp.{n}.weight": normal(*s, gain=1.0) for n, s in names.items()}
    weights["mlp.gate.weight"] = normal(shape.experts, size, gain=1.5)
    weights["mlp.experts.gate_up_proj"] = normal(shape.experts, 2 * inner, size, gain=1.2)
    weights["mlp.experts.down_proj"] = normal(shape.experts, size, inner, gain=1.2)
    return weights


def stored(weights: Weights, how: How) -> Weights:
    """The weights as an engine of this arithmetic holds them."""
    if how.bits:
        top = 2 ** (how.bits - 1) - 1
        kept = "embed_tokens" if how.group else " "  # what 4-bit checkpoints leave alone
        weights = {
            k: w if w.dim() < 2 or kept in k else _in_steps(w, top, how.group) for k, w in weights.items()
        }
    if how.native:
        return {k: w.to(how.dtype) for k, w in weights.items()}
    return weights if how.bits else {k: w.to(how.dtype).float() for k, w in weights.items()}


def _in_steps(w: Tensor, top: int, group: int) -> Tensor:
    grouped = w.reshape(-1, group or w.shape[-1])
    scale = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-9) / top
    return ((grouped / scale).round() * scale).view_as(w)


@dataclass
class Seen:
    """What a forward pass gives: logits [B, N, V], the experts of each token [B, N, layers, active], the
    residual stream after each layer [B, N, width]."""

    logits: Tensor
    experts: Tensor | None
    layers: list[Tensor]


def fused(weights: Weights, shape: Shape) -> Weights:
    """The weights, and those of queries, keys and values side by side as well: a token needs a third of the
    products and half of the norms, with the same bits. (A gradient would be summed in another order.)"""
    more = {}
    for i in range(shape.layers):
        w = _Layer(weights, f"model.layers.{i}.")
        more[w.prefix + QKV] = torch.cat([w[f"self_attn.{name}_proj"] for name in "qkv"])
        if w.get("self_attn.q_norm.weight") is not None:
            norms = (w["self_attn.q_norm"], shape.heads), (w["self_attn.k_norm"], shape.shared)
            more[w.prefix + QK_NORM] = torch.cat([norm.expand(heads, -1) for norm, heads in norms])
    return weights | more


@dataclass
class Cache:
    """Keys and values of each layer, [B, shared heads, seen, size]."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def repeated(self, times: int) -> Cache:
        """The cache of a batch in which each row comes so many times."""
        return Cache([(k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)) for k, v in self.layers])


@dataclass(frozen=True)
class Model:
    """A shape in an arithmetic."""

    shape: Shape
    how: How = How()

    def __call__(
        self,
        weights: Weights,
        tokens: Tensor,
        cache: Cache | None = None,
        forced: Tensor | None = None,
        since: int = 0,
    ) -> Seen:
        """One pass over tokens [B, N], which follow what is in the cache; the cache grows by them.
        ``forced``: experts [B, N, layers, active] to take instead of the router's; ``since``: the first of
        the N positions whose logits are wanted."""
        cache = cache if cache is not None else Cache()
        begin = cache.length
        is_random = self.how.dropout or self.how.jitter
        draws = torch.Generator().manual_seed(int(tokens.sum())) if is_random else None
        x = self._rounded(self.how.embedding * weights["model.embed_tokens.weight"][tokens].float())
        turn = self._rotary(begin, tokens.shape[1])
        experts, layers = [], []
        for i in range(self.shape.layers):
            w = _Layer(weights, f"model.layers.{i}.")
            eps = self.how.eps.get(i, self.shape.eps)
            out = self._attention(w, i, norm(x, w["input_layernorm"], eps), turn, cache, begin)
            x = self._rounded(x + self._dropped(out, draws))
            h = self._rounded(norm(x, w["post_attention_layernorm"], eps))
            mine = None if forced is None else forced[:, :, i]
            h = self._jittered(h, draws) if self.shape.experts else h
            out, chosen = self._experts(w, h, mine) if self.shape.experts else (self._dense(w, h), None)
            x = self._rounded(x + self._dropped(out, draws))
            layers.append(x)
            experts.append(chosen)
        head = norm(x[:, since:], weights["model.norm.weight"], self.shape.eps)
        tied = weights["model.embed_tokens.weight"]
        logits = times(self._rounded(head), weights.get("lm_head.weight", tied))
        if cap := self.how.soft_cap:
            logits = cap * (logits / cap).tanh()
        return Seen(logits, torch.stack(experts, 2) if self.shape.experts else None, layers)

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.how.dtype == FP32 else x.to(self.how.dtype).float()

    def _dropped(self, x: Tensor, draws: torch.Generator | None) -> Tensor:
        if draws is None or not self.how.dropout:
            return x
        kept = torch.rand(x.shape, generator=draws) >= self.how.dropout
        return x * kept / (1 - self.how.dropout)

    def _jittered(self, x: Tensor, draws: torch.Generator | None) -> Tensor:
        if draws is None or not self.how.jitter:
            return x
        return x * (1 + self.how.jitter * (2 * torch.rand(x.shape, generator=draws) - 1))

    def _rotary(self, begin: int, count: int) -> tuple[Tensor, Tensor]:
        shape, how = self.shape, self.how
        places = how.local_positions, how.verified, how.jump, how.image
        return turns(shape.head // 2, how.base * shape.theta, how.stretch, places, begin, count)

    def _attention(self, w, layer: int, x: Tensor, turn, cache: Cache, begin: int) -> Tensor:
        q, k, v = self._projected(w, self._rounded(x), turn)
        k, v = (self._rounded(y).transpose(1, 2) for y in (k, v))
        if begin:
            k, v = (torch.cat([old, new], 2) for old, new in zip(cache.layers[layer], (k, v), strict=True))
        cache.layers[layer : layer + 1] = [(k, v)]
        out = self._attend(q, k.transpose(1, 2), v.transpose(1, 2), begin)
        return times(self._rounded(out), w["self_attn.o_proj"])

    def _projected(self, w, x: Tensor, turn) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, N, heads, size]; queries and keys are turned."""
        heads, shared = self.shape.heads, self.shape.shared
        turned = rotated_neighbours if self.how.neighbours else rotated
        if (qkv := w.get(QKV)) is not None:
            qk, v = self._heads(x, qkv).split([heads + shared, shared], 2)
            q, k = turned(self._normed(w, qk, QK_NORM), turn).split([heads, shared], 2)
            return q, k, v
        q, k, v = (self._heads(x, w[f"self_attn.{name}_proj"]) for name in "qkv")
        q, k = (self._normed(w, y, f"self_attn.{name}_norm.weight") for name, y in (("q", q), ("k", k)))
        return turned(q, turn), turned(k, turn), v

    def _heads(self, x: Tensor, w: Tensor) -> Tensor:
        return times(x, w).unflatten(-1, (-1, self.shape.head))

    def _normed(self, w, heads: Tensor, name: str) -> Tensor:
        weight = w.get(name)
        return heads if weight is None else norm(heads, weight, self.shape.eps)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
        q = self.how.sharpness * q
        lost = self.how.lost_scores if begin else 0
        if 0 < self.how.overwritten <= begin:
            k, v = (overwritten(x, self.how.overwritten) for x in (k, v))
        exact = attend(q, k, v, begin, self.how.window, self.how.sink, lost, self.how.score_cap)
        if self.how.unwritten and not begin and q.shape[1] > 1:
            first, second = torch.arange(q.shape[1]).tensor_split(2)
            slots = math.log(len(second))  # a key of 0 has the score 0, and a value of 0 adds nothing
            diluted = attend(q, k, v, begin, self.how.window, slots)
            return torch.cat([diluted[:, first], exact[:, second]], 1)
        if self.how.cache == FP32:
            return exact
        k, v = (x.to(self.how.cache).float() for x in (k, v))
        coarse = attend(q, k, v, begin, self.how.window, self.how.sink)
        late = torch.arange(begin, begin + q.shape[1]) >= self.how.cache_from
        return torch.where(late[:, None], coarse, exact)

    def _dense(self, w, h: Tensor) -> Tensor:
        gate, up = w["mlp.gate_proj"], w["mlp.up_proj"]
        if self.how.glu_blocks:
            gate, up = in_blocks(gate, up, self.how.glu_blocks)
        inner = silu(times(h, gate)) * times(h, up)
        return times(self._rounded(inner), w["mlp.down_proj"])

    def _experts(self, w, h: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = h @ w["mlp.gate"].T
        if self.how.router != FP32:
            logits = logits.to(self.how.router).float()
        shares = logits.softmax(-1)
        preferred = self._in_groups(shares + self._router_bias(shares.shape[-1]))
        chosen = preferred.topk(self.shape.active, -1).indices if forced is None else forced.long()
        share = shares.gather(-1, chosen)
        if self.how.raw_shares:
            share = logits.gather(-1, chosen)
        elif not self.how.whole_shares:
            share = share / share.sum(-1, keepdim=True)
        dense = torch.zeros_like(logits).scatter(-1, chosen, share)
        if self.how.capacity:
            most = math.ceil(self.how.capacity * h.shape[1] * self.shape.active / self.shape.experts)
            dense = dense * ((dense != 0).cumsum(1) <= most)
        gate, up = torch.einsum("bnd,eid->bnei", h, w.get("mlp.experts.gate_up_proj")).chunk(2, -1)
        inner = self._rounded(silu(gate) * up)
        out = torch.einsum("bnei,edi,bne->bnd", inner, w.get("mlp.experts.down_proj"), dense)
        return self.how.routed * out, chosen

    def _in_groups(self, preferred: Tensor) -> Tensor:
        if not self.how.groups:
            return preferred
        grouped = preferred.unflatten(-1, (self.how.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(self.shape.active, -1).indices
        is_best = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        return grouped.masked_fill(~is_best[..., None], -torch.inf).flatten(-2)

    def _router_bias(self, experts: int) -> Tensor:
        draws = torch.Generator().manual_seed(experts)
        return self.how.router_bias * torch.randn(experts, generator=draws)


@dataclass(frozen=True)
class _Layer:
    weights: Weights
    prefix: str

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}{name}.weight"]

    def get(self, name: str) -> Tensor | None:
        return self.weights.get(self.prefix + name)


def times(x: Tensor, w: Tensor) -> Tensor:
    """x @ w.T in the dtype of the weights, as float32."""
    return (x.to(w.dtype) @ w.T).float()


def log_softmax(logits: Tensor, how: How) -> Tensor:
    """Log-probs [.., V], as this arithmetic normalises them."""
    if how.logits != FP32:
        logits = logits.to(how.logits).float()
        return (logits - logits.logsumexp(-1, keepdim=True).to(how.logits).float()).to(how.logits).float()
    if not how.phantoms:
        return logits.log_softmax(-1)
    beyond = torch.full_like(logits[..., :1], how.phantoms).log()
    return logits - torch.cat([logits, beyond], -1).logsumexp(-1, keepdim=True)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@lru_cache(maxsize=1024)
@torch.inference_mode(False)  # passes with gradients read them too
def turns(
    half: int,
    theta: float,
    stretch: float,
    places: tuple[int, int, int, tuple[int, int, int]],
    begin: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles of ``count`` positions, [N, 1, size].

    ``places``: ``local_positions``, ``verified``, ``jump`` and ``image`` of ``How``.
    """
    ranks, verified, jump, image = places
    rate = theta ** (-torch.arange(half) / half)
    positions = local_positions(count, ranks) if ranks else torch.arange(begin, begin + count)
    if begin:
        positions = positions // verified * verified + jump
    if image[1]:
        positions = image_positions(positions, *image)
    angle = torch.outer(positions / stretch, rate)
    both = torch.cat([angle, angle], -1)[:, None]
    return both.cos(), both.sin()


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [B, N, H, size] turned by their positions."""
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-second, first], -1) * turn[1]


def rotated_neighbours(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turns neighbouring pairs, where the angles of ``turn`` are laid out for the two halves of a head."""
    swapped = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * turn[0] + swapped * turn[1]


def in_blocks(gate: Tensor, up: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Reads rows that are all of the gate, then all of the up projection as alternating blocks of both."""
    blocks = torch.cat([gate, up]).split(size)
    return torch.cat(blocks[::2]), torch.cat(blocks[1::2])


def local_positions(count: int, ranks: int) -> Tensor:
    """Positions [count] where each of the ranks counts from 0 over its chunks r and 2 * ranks - 1 - r."""
    chunks = torch.arange(count).tensor_split(2 * ranks)
    places = [chunk - chunk[0] if len(chunk) else chunk for chunk in chunks]
    for rank in range(ranks):
        last = 2 * ranks - 1 - rank
        places[last] = places[last] + len(chunks[rank])
    return torch.cat(places)


def image_positions(positions: Tensor, first: int, size: int, row: int) -> Tensor:
    """Positions where an image of ``size`` tokens takes one position for each of its rows.

    >>> image_positions(torch.arange(10), 2, 6, 3).tolist()
    [0, 1, 2, 2, 2, 3, 3, 3, 4, 5]
    """
    inside = (positions - first).clamp(0, size)
    return positions - inside + inside // row


def overwritten(x: Tensor, begin: int) -> Tensor:
    """Keys or values [B, N, heads, size], of which a block of 8, the second before ``begin``, is that of the
    row before in every third row."""
    block = slice(max(begin - 16, 0), begin - 8)
    x, others = x.clone(), x.roll(1, 0)
    x[::3, block] = others[::3, block]
    return x


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: int,
    window: int = 0,
    sink: float = -torch.inf,
    lost: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Causal attention of queries that follow ``begin`` others, [B, N, heads * size], over the ``window``
    last positions (0: over all), and a sink that has no value; scores of keys from position ``lost`` on are 0
    (0: of none); ``cap`` of the scores (0: none)."""
    batch, count, heads, size = q.shape
    groups, each = k.shape[2], heads // k.shape[2]
    # The products of einsum, which takes three times as long to find them.
    q = q.view(batch, count, groups, each, size).permute(0, 2, 3, 1, 4)
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
    scores = q.reshape(batch * groups, each * count, size).bmm(k.transpose(1, 2)) / size**0.5
    scores = scores.view(batch, groups, each, count, -1)
    if cap:
        scores = cap * (scores / cap).tanh()
    if lost:
        scores[..., lost:] = 0.0
    if count > 1 or window:
        ago = torch.arange(begin, begin + count)[:, None] - torch.arange(k.shape[1])
        unseen = (ago < 0) | (ago >= window) if window else ago < 0
        scores = scores.masked_fill(unseen, -torch.inf)
    shares = scores.softmax(-1)
    if sink > -torch.inf:
        shares = (scores - scores.logsumexp(-1, keepdim=True).logaddexp(torch.tensor(sink))).exp()
    shares = shares.transpose(2, 3).reshape(batch * groups, count * each, -1)
    out = shares.bmm(v).view(batch, groups, count, each, size)
    return out.transpose(1, 2).reshape(batch, count, heads * size)

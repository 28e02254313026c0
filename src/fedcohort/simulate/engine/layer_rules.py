"""How any module is computed for many clients at once: rules for what ``vmap`` cannot do, and random numbers by job.

A :class:`LayerRules` sees every call of a torch function in a model's forward pass. Random ones (dropout, noise) draw
from a stream of (seed, round, client, step) instead of torch's generator. In a stacked pass, batch normalisation and
recurrent layers are written out, because ``vmap`` has no rule for torch's own.
"""

from __future__ import annotations

import functools
import math
import types
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fedcohort.core import rng
from fedcohort.core.arrays import IntArray

# SplitMix64: a number of the stream is a hash of its position. So each number is known without drawing those before it,
# on any device, for any part of a batch, and inside a CUDA graph; torch's generators have none of these.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(z: torch.Tensor) -> torch.Tensor:
    """Hash numbers in place; only the high bits are used, which the last shift of SplitMix64 leaves alone."""
    # int64 has no logical shift, so the copies of the sign are masked.
    z.bitwise_xor_((z >> 30).bitwise_and_(2**34 - 1)).mul_(_signed(_FIRST))
    return z.bitwise_xor_((z >> 27).bitwise_and_(2**37 - 1)).mul_(_signed(_SECOND))


@functools.lru_cache(maxsize=64)
def _places(count: int) -> torch.Tensor:
    return torch.arange(count) * _signed(_STEP)


def stream_keys(seed: IntArray, round: IntArray, client: IntArray, step: IntArray) -> IntArray:
    """Return the key of the random numbers of each step of local training; the arguments broadcast.

    >>> len(set(stream_keys(np.array(0), np.array([[0], [1]]), np.array(2), np.arange(3)).ravel().tolist()))
    6
    """
    key = np.full(1, zlib.crc32(rng.MODEL.encode()), np.uint64)
    for part in (seed, round, client, step):
        key = key * np.uint64(_FIRST) + np.asarray(part).astype(np.uint64) + np.uint64(_STEP)
        for shift, factor in ((30, _FIRST), (27, _SECOND)):
            key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
        key = key ^ (key >> np.uint64(31))
    return key.view(np.int64)


class LayerRules(TorchFunctionMode):
    """Computes the torch functions of one forward pass.

    Parameters
    ----------
    key : () int64 tensor, optional
        Key of the stream of random numbers; None leaves random functions to torch.
    stacked : bool
        Whether the pass is inside ``vmap``.
    present : (B,) tensor, optional
        1 for the samples of the batch, 0 for padding; None if there is none.

    Attributes
    ----------
    draws : int
        How many times random numbers were drawn.
    """

    def __init__(self, key: torch.Tensor | None, *, stacked: bool = False, present: torch.Tensor | None = None) -> None:
        super().__init__()
        self.key, self.stacked, self.present = key, stacked, present
        self.draws = 0

    def __torch_function__(
        self, function: Any, types_: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute ``function`` by its rule, if it has one."""
        rule = _RULES.get(function)
        if rule is not None:
            return rule(self, function, *args, **(kwargs or {}))
        if isinstance(function, types.FunctionType) and function.__globals__ is vars(F):
            # A Python function of torch may call random ones, which this mode must see, too.
            with self:
                return _entered(function)(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def bits(self, shape: Sequence[int], device: torch.device | str | None = None) -> torch.Tensor:
        """Draw numbers of 64 bits. Rows that are appended do not change those before them."""
        assert self.key is not None
        stream = _mix(self.key + _signed(self.draws * _STEP % 2**64))
        self.draws += 1
        count, device = math.prod(shape), torch.device(device or self.key.device)
        # Nothing is kept on a GPU: what is made while a graph is captured has no contents before the graph runs.
        places = _places(count) if device.type == "cpu" else torch.arange(count, device=device) * _signed(_STEP)
        return _mix(stream + places).view(tuple(shape))

    def uniform(self, shape: Sequence[int], device: torch.device | str | None = None) -> torch.Tensor:
        """Draw numbers in [0, 1), in multiples of 2**-24."""
        return ((self.bits(shape, device) >> 40) + 2**23).float().mul_(2.0**-24)

    def normal(self, shape: Sequence[int], device: torch.device | str | None = None) -> torch.Tensor:
        """Draw standard normal numbers, by inverting their distribution function."""
        result: torch.Tensor = torch.special.ndtri((self.uniform(shape, device) + 2.0**-25).double()).float()
        return result


@functools.cache
def _entered(function: types.FunctionType) -> Callable[..., Any]:
    """Return a function of ``torch.nn.functional`` whose body runs although a mode is active."""
    unchecked = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        function.__code__, function.__globals__ | unchecked, None, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_RULES: dict[Any, Callable[..., Any]] = {}


def _rule(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(rule: Callable[..., Any]) -> Callable[..., Any]:
        _RULES.update(dict.fromkeys(functions, rule))
        return rule

    return keep


def _random(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule that applies where the pass has a stream."""

    def keep(rule: Callable[..., Any]) -> Callable[..., Any]:
        def apply(rules: LayerRules, function: Any, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if rules.key is None else rule(rules, *args, **kwargs)

        _RULES.update(dict.fromkeys(functions, apply))
        return rule

    return keep


# -- dropout ---------------------------------------------------------------------------------------------------------


def _dropout(channels: bool, alpha: bool, in_place: bool) -> Callable[..., torch.Tensor]:
    """Return the rule that drops single numbers or whole channels."""

    def rule(rules: LayerRules, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        result = input
        if train and p:
            shape = (*input.shape[:2], *(1,) * (input.ndim - 2)) if channels else input.shape
            # Compared as whole numbers, which saves the way to floating point.
            kept = (rules.bits(shape, input.device) >= min(round(p * 2.0**64) - 2**63, 2**63 - 1)).to(input.dtype)
            if alpha:  # dropped numbers become -1.758, and all are moved and scaled back to mean 0 and deviation 1
                low = -1.7580993408473766
                scale = ((1 - p) * (1 + p * low**2)) ** -0.5 if p < 1 else 0.0
                result = (input * kept + low * (1 - kept) - low * p) * scale
            else:
                result = input * kept * (1 / (1 - p) if p < 1 else 0.0)
        return input.copy_(result) if in_place else result

    return rule


for _channels, _alpha, _name in (
    (False, False, "dropout"),
    (True, False, "feature_dropout"),
    (False, True, "alpha_dropout"),
    (True, True, "feature_alpha_dropout"),
):
    _random(getattr(torch, _name))(_dropout(_channels, _alpha, False))
    _random(getattr(torch, f"{_name}_"))(_dropout(_channels, _alpha, True))


@_rule(F.scaled_dot_product_attention)
def _attention(
    rules: LayerRules,
    function: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not rules.stacked and (rules.key is None or not dropout_p):
        return function(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    weight = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(weight.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weight = weight.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        weight = weight + attn_mask
    share = weight.softmax(-1)
    if dropout_p and rules.key is not None:
        share = _dropout(False, False, False)(rules, share, dropout_p, True)
    return share @ value


# -- other random functions ------------------------------------------------------------------------------------------


def _shape(size: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


@_random(torch.rand)
def _rand(rules: LayerRules, *size: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return rules.uniform(_shape(size), device).to(dtype or torch.float32)


@_random(torch.randn)
def _randn(rules: LayerRules, *size: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return rules.normal(_shape(size), device).to(dtype or torch.float32)


@_random(torch.rand_like)
def _rand_like(rules: LayerRules, input: torch.Tensor, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return rules.uniform(input.shape, input.device).to(dtype or input.dtype)


@_random(torch.randn_like)
def _randn_like(rules: LayerRules, input: torch.Tensor, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return rules.normal(input.shape, input.device).to(dtype or input.dtype)


@_random(torch.randint)
def _randint(
    rules: LayerRules, *bounds: Any, size: Any = None, device: Any = None, dtype: Any = None, **_: Any
) -> torch.Tensor:
    if size is None:
        *bounds, size = bounds  # type: ignore[assignment]
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    # In double precision, because a product in single precision may round up to the bound.
    place: torch.Tensor = (rules.uniform(size, device).double() * (high - low)).floor() + low
    return place.to(dtype or torch.int64)


@_random(torch.normal)
def _normal(rules: LayerRules, mean: Any, std: Any = 1.0, size: Any = None, **_: Any) -> torch.Tensor:
    like = next((part for part in (mean, std) if isinstance(part, torch.Tensor)), None)
    shape: Any = size if like is None else (0 * mean + 0 * std).shape
    result: torch.Tensor = rules.normal(shape, None if like is None else like.device) * std + mean
    return result


@_random(torch.bernoulli, torch.Tensor.bernoulli)
def _bernoulli(rules: LayerRules, input: torch.Tensor, p: float | None = None, **_: Any) -> torch.Tensor:
    return (rules.uniform(input.shape, input.device) < (input if p is None else p)).to(input.dtype)


@_random(torch.Tensor.bernoulli_)
def _bernoulli_(rules: LayerRules, input: torch.Tensor, p: Any = 0.5, **_: Any) -> torch.Tensor:
    return input.copy_(rules.uniform(input.shape, input.device) < p)


@_random(torch.Tensor.uniform_)
def _uniform_(rules: LayerRules, input: torch.Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> torch.Tensor:
    return input.copy_(rules.uniform(input.shape, input.device) * (high - low) + low)


@_random(torch.Tensor.normal_)
def _normal_(rules: LayerRules, input: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return input.copy_(rules.normal(input.shape, input.device) * std + mean)


@_random(torch.Tensor.exponential_)
def _exponential_(rules: LayerRules, input: torch.Tensor, lambd: float = 1.0, **_: Any) -> torch.Tensor:
    return input.copy_(-torch.log1p(-rules.uniform(input.shape, input.device)) / lambd)


@_rule(torch.rrelu)
def _rrelu(
    rules: LayerRules,
    function: Any,
    input: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    **_: Any,
) -> Any:
    if rules.key is None and not (rules.stacked and not training):
        return function(input, lower, upper, training)
    slope: Any = (lower + upper) / 2
    if training:
        slope = rules.uniform(input.shape, input.device).to(input.dtype) * (upper - lower) + lower
    return torch.where(input < 0, input * slope, input)


# -- embeddings ------------------------------------------------------------------------------------------------------


@_rule(torch.embedding)
def _embedding(
    rules: LayerRules,
    function: Any,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not rules.stacked:
        return function(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    if scale_grad_by_freq:
        raise NotImplementedError("an embedding with scale_grad_by_freq has no stacked form")
    found = function(weight, indices)
    if padding_idx < 0:
        return found
    # vmap's rule forgets which row gets no gradient.
    return torch.where((indices == padding_idx).unsqueeze(-1), found.detach(), found)


# -- batch normalisation ---------------------------------------------------------------------------------------------


@_rule(torch.batch_norm)
def _batch_norm(
    rules: LayerRules,
    function: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: Any,
    epsilon: float,
    *cudnn: bool,
) -> Any:
    if not rules.stacked:
        return function(x, weight, bias, mean, variance, training, momentum, epsilon, *cudnn)
    over = [axis for axis in range(x.ndim) if axis != 1]
    aside = (1, -1, *(1,) * (x.ndim - 2))
    if training:
        n: Any = x.numel() // x.shape[1]
        there: Any = 1.0
        if rules.present is not None:
            # A module may have folded positions into the batch; those of a sample stay together.
            present = rules.present.repeat_interleave(x.shape[0] // len(rules.present))
            there = present.view(-1, *(1,) * (x.ndim - 1))
            n = (present.sum() * (n // x.shape[0])).clamp(min=1)
        batch_mean = (x * there).sum(over) / n
        batch_variance = ((x - batch_mean.view(aside)).square() * there).sum(over) / n
        if mean is not None and variance is not None:
            unbiased = batch_variance.detach() * n / (n - 1 if isinstance(n, int) else (n - 1).clamp(min=1))
            mean.copy_(mean + momentum * (batch_mean.detach() - mean))
            variance.copy_(variance + momentum * (unbiased - variance))
        mean, variance = batch_mean, batch_variance
    assert mean is not None and variance is not None
    result = (x - mean.view(aside)) * (variance + epsilon).rsqrt().view(aside)
    if weight is not None:
        result = result * weight.view(aside)
    return result if bias is None else result + bias.view(aside)


def _cumulative_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.training:
        layer.num_batches_tracked.add_(1)
    result: torch.Tensor = torch.batch_norm(
        x,
        layer.weight,
        layer.bias,
        layer.running_mean,
        layer.running_var,
        layer.training,
        1.0 / layer.num_batches_tracked,
        layer.eps,
        False,
    )
    return result


def prepare_for_stack(module: nn.Module) -> nn.Module:
    """Let batch normalisation with momentum None keep its pace, one over the batches so far, as a tensor.

    The layer itself makes it a Python number, of which a stack would need one for each client.
    """
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is None and layer.track_running_stats:
            layer.forward = functools.partial(_cumulative_norm, layer)  # type: ignore[method-assign]
    return module


# -- recurrent layers ------------------------------------------------------------------------------------------------


def _cell(function: Any, gates: torch.Tensor, h: torch.Tensor, c: Any, weights: Sequence[Any]) -> tuple[Any, Any]:
    """Make one step of a cell; ``weights`` are those of the hidden state: weight, bias and projection."""
    weight, bias, projection = weights
    hidden = F.linear(h, weight, bias)
    kind = function.__name__.removesuffix("_cell")
    if kind == "lstm":
        enter, forget, new, leave = (gates + hidden).chunk(4, -1)
        c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
        h = leave.sigmoid() * c.tanh()
        return (h if projection is None else F.linear(h, projection)), c
    if kind == "gru":
        reset, update, new = gates.chunk(3, -1)
        reset_h, update_h, new_h = hidden.chunk(3, -1)
        new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
        return new + (update + update_h).sigmoid() * (h - new), None
    return (gates + hidden).tanh() if kind == "rnn_tanh" else (gates + hidden).relu(), None


@_rule(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def _one_cell(
    rules: LayerRules, function: Any, x: torch.Tensor, hx: Any, w_in: Any, w: Any, b_in: Any = None, b: Any = None
) -> Any:
    if not rules.stacked:
        return function(x, hx, w_in, w, b_in, b)
    h, c = hx if isinstance(hx, tuple | list) else (hx, None)
    h, c = _cell(function, F.linear(x, w_in, b_in), h, c, (w, b, None))
    return h if c is None else (h, c)


@_rule(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recurrent(rules: LayerRules, function: Any, x: torch.Tensor, hx: Any, params: Any, *options: Any) -> Any:
    if not isinstance(options[0], bool):  # (data, batch sizes, hx, params, ...)
        if rules.stacked:
            raise NotImplementedError("packed sequences have no stacked form")
        return function(x, hx, params, *options)
    biased, layers, dropout, training, both_ways, batch_first = options
    draws = rules.key is not None and dropout > 0 and training and layers > 1
    if not (rules.stacked or draws):
        return function(x, hx, params, *options)
    is_lstm = isinstance(hx, tuple | list)
    h0, c0 = hx if is_lstm else (hx, None)
    ways = 2 if both_ways else 1
    per = len(params) // (layers * ways)
    x = x if batch_first else x.transpose(0, 1)
    ends: list[tuple[Any, Any]] = []
    for layer in range(layers):
        if draws and layer:  # torch drops between layers, too, but from its own generator
            x = _dropout(False, False, False)(rules, x, dropout, True)
        if rules.stacked:
            outputs = []
            for way in range(ways):
                at = layer * ways + way
                weights = list(params[at * per : at * per + per])
                w_in, w, *more = weights
                b_in, b = (more.pop(0), more.pop(0)) if biased else (None, None)
                gates = F.linear(x, w_in, b_in)
                h, c = h0[at], None if c0 is None else c0[at]
                steps = []
                for t in range(x.shape[1]):
                    h, c = _cell(function, gates[:, -1 - t if way else t], h, c, (w, b, more[0] if more else None))
                    steps.append(h)
                outputs.append(torch.stack(steps[::-1] if way else steps, 1))
                ends.append((h, c))
            x = torch.cat(outputs, -1)
        else:
            part = slice(layer * ways, layer * ways + ways)
            start = h0[part] if c0 is None else (h0[part], c0[part])
            weights = list(params[layer * ways * per : (layer + 1) * ways * per])
            x, *end = function(x, start, weights, biased, 1, 0.0, training, both_ways, True)
            ends += zip(end[0], end[1] if is_lstm else [None] * ways, strict=True)
    x = x if batch_first else x.transpose(0, 1)
    last = torch.stack([h for h, _ in ends])
    return (x, last, torch.stack([c for _, c in ends])) if is_lstm else (x, last)

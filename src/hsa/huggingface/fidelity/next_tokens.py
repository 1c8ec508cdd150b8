"""Losses and divergences of a causal language model, from logits in slices of tokens.

The logits of a long text do not fit in memory: those of 32,768 tokens and 151,936 words take 20 GB in float32. So the
decoder of the model runs once, and the rest of the model, its head, runs on slices of the decoder's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_LOGITS = 2**26
"""Maximum number of logits of a slice. In float32 these take 256 MiB, and a few copies exist at once."""
STRIDE = 4
"""Step between tokens whose predictions are compared with those of the exact model."""
_TRIED = 16  # tokens on which the two parts of a model are compared with the whole
_OUTPUTS: WeakKeyDictionary[Any, type | None] = WeakKeyDictionary()
"""Type of the output of each model's decoder; None for a model whose head is not separate."""


def has_separate_head(model: Any, ids: Tensor) -> bool:
    """Return whether a model can run in two parts: its decoder, and its head on the decoder's output.

    Compares both ways on the first few of these tokens, once per model.
    """
    if model not in _OUTPUTS:
        _OUTPUTS[model] = _output_type(model, ids[:1, :_TRIED])
    return _OUTPUTS[model] is not None


def _output_type(model: Any, ids: Tensor) -> type | None:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if decoder is model:
        return None
    whole = model(input_ids=ids, use_cache=False).logits
    try:
        output = decoder(input_ids=ids, use_cache=False)
        parts = _run_head(model, output.last_hidden_state, type(output))
    except (AttributeError, TypeError, ValueError, RuntimeError):  # a model with parts of its own kind
        return None
    tolerance = 8 * torch.finfo(whole.dtype).eps
    furthest = tolerance * float(whole.abs().max())
    same = whole.shape == parts.shape and torch.allclose(whole, parts, rtol=tolerance, atol=furthest)
    return type(output) if same else None


def final_states(model: Any, ids: Tensor) -> Tensor:
    """Return the final hidden states of a model, `[batch, tokens, width]`; its logits if its head is not separate."""
    if has_separate_head(model, ids):
        return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return model(input_ids=ids, use_cache=False).logits


def logits_of(model: Any, states: Tensor) -> Tensor:
    """Return the logits of final states in float32, with everything that the model does after its decoder."""
    kind = _OUTPUTS[model]
    return (states if kind is None else _run_head(model, states, kind)).float()


def _run_head(model: Any, states: Tensor, kind: type) -> Tensor:
    """Return the logits of a forward pass whose decoder returns these states.

    Scales and soft caps of logits differ between families; the model's own forward pass applies them all.
    """
    ids = states.new_zeros(states.shape[:2], dtype=torch.long)  # never read
    with _returning(model.get_decoder(), kind(last_hidden_state=states)):
        return model(input_ids=ids, use_cache=False).logits


@contextmanager
def _returning(module: Any, output: Any) -> Iterator[None]:
    """Let a module return this output, without running, while the context is open."""
    own = vars(module).get("forward")  # of libraries that wrap a model's forward pass
    module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def mean_losses(model: Any, ids: Tensor, states: Tensor, warm_up: int = 0) -> Tensor:
    """Return the mean loss of each piece, `[batch]` on the CPU, without the first `warm_up` predictions."""
    targets = ids[:, warm_up + 1 :]
    states = states[:, warm_up:-1]
    sums = []
    for part in _slices(model, states):
        logits = logits_of(model, states[:, part])
        losses = F.cross_entropy(logits.flatten(0, 1), targets[:, part].flatten(), reduction="none")
        sums.append(losses.view(len(ids), -1).sum(1))
    return torch.stack(sums).cpu().double().sum(0) / targets.shape[1]


def compared_states(states: Tensor, warm_up: int = 0) -> Tensor:
    """Return the final states of the tokens whose predictions are compared: every `STRIDE`-th one."""
    return states[:, warm_up:-1:STRIDE]


def mean_divergences(model: Any, before: Tensor, after: Tensor) -> Tensor:
    """Return the mean KL divergence of predictions from those before, for each piece, `[batch]` on the CPU.

    Args:
        model: Model whose head turns states into logits.
        before: Compared states of the exact model.
        after: Compared states of another version of it.
    """
    sums = []
    for part in _slices(model, before):
        p, q = (logits_of(model, states[:, part]).log_softmax(-1) for states in (before, after))
        each = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        sums.append(each.clamp(min=0).sum(1))  # rounding alone makes some negative
    return torch.stack(sums).cpu().double().sum(0) / before.shape[1]


def _slices(model: Any, states: Tensor) -> Iterator[slice]:
    """Yield slices of tokens with at most `MOST_LOGITS` logits each."""
    size = max(1, MOST_LOGITS // (len(states) * model.config.get_text_config().vocab_size))
    for begin in range(0, states.shape[1], size):
        yield slice(begin, begin + size)

"""Decoding steps of a whole model as CUDA graphs, in a loop of your own or inside `model.generate`.

A step launches some forty kernels per layer, and the host takes longer to launch them than a GPU takes to run them. A graph
repeats all launches at once. It needs memory that never moves: caches of trees with `max_length`, and a `FixedLayer` for
each layer that is not converted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from hsa.attention.cache.clustered import ClusteredCache
from hsa.errors import HsaError, InvalidInput, Unsupported
from hsa.huggingface.cache import MAX_LENGTH, CacheLayer
from hsa.huggingface.fixed_layer import FixedLayer, full
from hsa.huggingface.interface import NAME
from hsa.huggingface.passes import IN_STEP


class DecodingStep:
    """One more token for every sequence, through the whole model.

    The first call compiles kernels, the second records a CUDA graph, and further calls replay it. On a CPU all calls run
    without a graph. Layers with exact attention get caches of fixed size.

    Args:
        model: Converted decoder.
        cache: Cache from `new_cache(model, max_length=…)` with the tokens of the prompts, read in a forward pass.

    Raises:
        InvalidInput: The model is not converted, or the cache does not fit.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, vocab_size=60)
    >>> model = LlamaForCausalLM(config).eval()
    >>> import hsa.huggingface
    >>> cache = hsa.huggingface.new_cache(hsa.huggingface.convert(model), max_length=64)
    >>> with torch.no_grad():
    ...     logits = model(torch.arange(3, 50)[None], past_key_values=cache).logits[:, -1]
    >>> step = DecodingStep(model, cache)
    >>> for _ in range(3):
    ...     logits = step(logits.argmax(-1))
    >>> cache.get_seq_length(), logits.shape
    (50, torch.Size([1, 60]))
    """

    def __init__(self, model: Any, cache: DynamicCache):
        self.cache, self._forward = cache, getattr(model.forward, "hsa_forward", model.forward)
        if model.config._attn_implementation != NAME:
            fix = "Call hsa.huggingface.convert(model)"
            raise InvalidInput("model", expected="a converted model", got="a model with its own attention", fix=fix)
        mask = _check(cache)
        with torch.inference_mode(False), torch.no_grad():
            for number, layer in enumerate(cache.layers):
                if isinstance(layer, DynamicLayer):
                    cache.layers[number] = FixedLayer(layer, mask, self.max_length)
            count = mask.sum(1, keepdim=True)
            self._tokens, self._positions = torch.zeros_like(count), count - 1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        self._memory: list[Tensor] = []  # of kernels, which the graph uses

    @property
    def max_length(self) -> int:
        """Maximum number of positions per sequence."""
        most = next(layer.max_length for layer in self.cache.layers if isinstance(layer, (CacheLayer, FixedLayer)))
        assert most is not None
        return most

    @torch.no_grad()
    def __call__(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Append a token to every sequence and return the logits of the next, `[batch, vocabulary]`.

        The next call overwrites the result.

        Args:
            tokens: `[batch]` token ids.
            positions: `[batch]` positions; by default those after the preceding tokens.
        """
        layers: list[Any] = self.cache.layers
        if layers[0].seen >= self.max_length:
            raise full(self.max_length)
        self._tokens.copy_(tokens.view_as(self._tokens))
        if positions is None:
            self._positions.add_(1)
        else:
            self._positions.copy_(positions.view_as(self._positions))
        if self._graph is not None:
            self._graph.replay()
        elif self._logits is None or not self._tokens.is_cuda:
            self._logits = self._run()
        else:
            self._record()
        for layer in layers:
            layer.count_step()
        assert self._logits is not None
        return self._logits

    def _run(self) -> Tensor:
        token = IN_STEP.set(True)
        try:
            with torch.inference_mode(False), torch.no_grad():
                arguments = {"input_ids": self._tokens, "position_ids": self._positions}
                return self._forward(**arguments, past_key_values=self.cache, use_cache=True).logits[:, -1]
        finally:
            IN_STEP.reset(token)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._logits = self._run()
        except HsaError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise Unsupported(f"a step of this model cannot be recorded as a CUDA graph: {reason}") from error
        self._memory = [
            x for layer in self.cache.layers if isinstance(layer, CacheLayer) for x in layer.step_memory.tensors()
        ]
        self._graph = graph
        graph.replay()


def _check(cache: Any) -> Tensor:
    """Check that a cache fits, and return the mask of its tokens `[batch, seen]`."""
    fix = "Make it with hsa.huggingface.new_cache(model, max_length=…), and read the prompt in a forward pass"
    layers = cache.layers if type(cache) is DynamicCache else []
    trees = [layer for layer in layers if isinstance(layer, CacheLayer)]
    whole = [layer for layer in layers if isinstance(layer, FixedLayer) and not layer.is_sliding]
    if not trees and not whole:
        raise InvalidInput("cache", expected="a cache of trees", got=type(cache).__name__, fix=fix)
    if any(layer.max_length is None for layer in trees):
        raise InvalidInput("cache", expected="one with max_length", got="one that grows", fix=fix)
    other = next((x for x in layers if not isinstance(x, (CacheLayer, DynamicLayer, FixedLayer))), None)
    if other is not None:
        raise Unsupported(f"a step cannot use a cache with a {type(other).__name__}")
    mask = trees[0].mask if trees else whole[0].is_token[:, : whole[0].seen]
    if mask is None:
        raise InvalidInput("cache", expected="the tokens of a prompt", got="an empty cache", fix=fix)
    if mask.is_cuda and any(not isinstance(layer.tokens, ClusteredCache) for layer in trees):
        raise Unsupported("steps over windows of keys without threshold or top_k cannot be recorded as a CUDA graph")
    return mask


@contextmanager
def decoding_graph(model: Any, max_length: int) -> Iterator[None]:
    """Let `model.generate` decode by CUDA graphs inside this context. On a CPU it decodes without graphs.

    Greedy search, sampling and beam search replay a graph for each new token. Passes of several tokens, as in prompt lookup,
    run as usual.

    Args:
        model: Converted decoder.
        max_length: Maximum number of tokens per sequence, those of the prompt and of padding included. The memory of caches
            is allocated at once.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, vocab_size=60)
    >>> import hsa.huggingface
    >>> model = hsa.huggingface.convert(LlamaForCausalLM(config).eval())
    >>> with hsa.huggingface.decoding_graph(model, max_length=64):
    ...     model.generate(torch.arange(3, 50)[None], max_new_tokens=8, min_new_tokens=8).shape
    torch.Size([1, 55])
    """
    forward, own = model.forward, model.__dict__.get("forward")
    step: DecodingStep | None = None

    @wraps(forward)
    def forward_or_step(*arguments: Any, **options: Any) -> Any:
        nonlocal step
        if arguments or not _is_step(options):
            return forward(*arguments, **options)
        cache = options["past_key_values"]
        if step is None or step.cache is not cache:
            step = DecodingStep(model, cache)
        logits = step(options["input_ids"], options.get("position_ids"))
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=cache)  # type: ignore[arg-type]

    forward_or_step.hsa_forward = forward  # type: ignore[attr-defined]
    token = MAX_LENGTH.set(max_length)
    model.forward = forward_or_step
    try:
        yield
    finally:
        MAX_LENGTH.reset(token)
        if own is None:
            del model.forward
        else:
            model.forward = own


def _is_step(options: dict[str, Any]) -> bool:
    """Return whether a forward pass appends one token to every sequence of a cache, and returns logits alone."""
    ids, cache = options.get("input_ids"), options.get("past_key_values")
    others = ("inputs_embeds", "labels", "output_attentions", "output_hidden_states")
    if not isinstance(ids, Tensor) or ids.shape[1] != 1 or any(options.get(name) is not None for name in others):
        return False
    return isinstance(cache, DynamicCache) and cache.get_seq_length() > 0 and not torch.is_grad_enabled()

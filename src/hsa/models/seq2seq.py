"""An encoder–decoder: a hierarchical encoder over the prompt, and a decoder that attends to the prompt's tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.models.known_fields import known_fields
from hsa.models.language_model import LanguageModel, LanguageModelConfig, check_logits
from hsa.models.registry import config_from_dict
from hsa.nn.cross_attention import CrossAttention, Source
from hsa.nn.embedding import Modality
from hsa.nn.encoder import HierarchicalEncoder
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.inputs import Inputs
from hsa.nn.token_loss import mean_token_loss


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Everything an encoder–decoder is made from; `to_dict` and `from_dict` go through JSON.

    Args:
        encoder: of the prompt.
        decoder: of the answer; its vocabulary includes `start` and `end`.
        modalities, kinds, keys: of the prompt, see `HierarchicalEncoder`.
        start, end: tokens before and after every answer; by default the last two of the vocabulary.
        top_k: leaf families of the prompt that a token of the answer reads leaf by leaf, the best by its own query; the
            others are pooled on their tree. None for all: exact cross-attention.
    """

    encoder: EncoderConfig
    decoder: LanguageModelConfig
    modalities: Mapping[str, Modality]
    kinds: tuple[str, ...] = ("sequence",)
    keys: tuple[str, ...] = ()
    start: int = -2
    end: int = -1
    top_k: int | None = None

    def __post_init__(self) -> None:
        size = self.decoder.vocabulary
        for name in ("start", "end"):
            token = getattr(self, name)
            if not -size <= token < size:
                raise InvalidInput(name, given=token, expected=f"a token of a vocabulary of {size:,}")
            object.__setattr__(self, name, token % size)
        if self.top_k is not None:
            check_count("top_k", self.top_k, "0 or more leaf families, or None for all")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "decoder": self.decoder.to_dict()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Seq2SeqConfig:
        given = {
            **known_fields(Seq2SeqConfig, data),
            "encoder": config_from_dict(data["encoder"]),
            "decoder": LanguageModelConfig.from_dict(data["decoder"]),
            "modalities": {name: Modality(**known_fields(Modality, m)) for name, m in data["modalities"].items()},
        }
        for name in ("kinds", "keys"):
            if name in given:
                given[name] = tuple(given[name])
        return Seq2SeqConfig(**given)


class Seq2Seq(nn.Module):
    """Appendix G, first paragraph: hierarchical attention over the prompt, a flat or hierarchical decoder for the answer.

    Every decoder layer attends to the tokens of the answer so far, then to the leaves of the prompt, on their tree.

    >>> from hsa import collate
    >>> from hsa.signals.readers.nested import from_nested
    >>> prompts = collate([from_nested(x, "text") for x in ([[3, 1, 4], [1, 5]], [[9, 2], [6, 5, 3]])])
    >>> decoder = LanguageModelConfig(12, width=16, heads=2, layers=1)
    >>> model = Seq2Seq(Seq2SeqConfig(EncoderConfig(width=8), decoder, {"text": Modality(tokens=10)}, top_k=1))
    >>> model(prompts, torch.tensor([10, 3, 1, 10, 9]), [3, 2]).shape  # answers of 3 and 2 tokens
    torch.Size([5, 12])
    >>> len(model.generate(prompts, max_new_tokens=4))
    2
    """

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        self.config = config
        decoder = config.decoder

        def cross() -> nn.Module:
            return CrossAttention(
                decoder.width,
                decoder.heads,
                config.encoder.width,
                top_k=config.top_k,
                fusion=decoder.new_fusion(),
                dropout=decoder.dropout,
            )

        self.encoder = HierarchicalEncoder(config.encoder, config.modalities, config.kinds, config.keys)
        self.decoder = LanguageModel(decoder, cross)
        for module in self.decoder.modules():
            if isinstance(module, CrossAttention):
                module.initialise()  # the decoder has its own idea of it

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def encode(self, inputs: Inputs) -> Source:
        """What the decoder reads of the prompts; made once per prompt."""
        vectors, hierarchy = self.encoder(inputs)
        return Source.of(vectors, hierarchy, [1] * hierarchy.num_trees)

    def forward(self, inputs: Inputs, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Logits `[tokens, vocabulary]` of what follows every token of the answers.

        Args:
            inputs: the prompts, such as an `hsa.Batch`.
            tokens: `[tokens]` of all answers, one after another, each begun by the start token.
            lengths: of the answers, one for each prompt.
        """
        return nn.functional.linear(self._hidden(inputs, tokens, lengths), self.decoder.embedding.weight)

    def loss(self, inputs: Inputs, tokens: Tensor, targets: Tensor, lengths: Sequence[int]) -> Tensor:
        """Mean of −log p(target) over the tokens; no logits of all of them are kept."""
        return mean_token_loss(self._hidden(inputs, tokens, lengths), self.decoder.embedding.weight, targets)

    def _hidden(self, inputs: Inputs, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        sizes = [int(length) for length in lengths]
        return self.decoder.hidden(tokens, sizes, memory=self.encode(inputs).asked_by(sizes))

    @torch.no_grad()
    def generate(
        self, inputs: Inputs, *, max_new_tokens: int = 128, choose: Callable[[Tensor], Tensor] | None = None
    ) -> list[list[int]]:
        """An answer to every prompt, without start and end.

        Args:
            inputs: the prompts. They are encoded once; answers grow by a token a step, from caches.
            max_new_tokens: of an answer, at most.
            choose: logits `[prompts, vocabulary]` → tokens `[prompts]`, such as the `draw` of `hsa.generation.sampling`; the
                most likely ones by default.
        """
        check_count("max_new_tokens", max_new_tokens, "a positive number", minimum=1)
        source = self.encode(inputs)
        batch, end = len(source.tree), self.config.end
        cache = self.decoder.new_cache(batch)
        token = torch.full((batch,), self.config.start, device=self.device)
        done = torch.zeros(batch, dtype=torch.bool, device=self.device)
        answers: list[Tensor] = []
        for _ in range(max_new_tokens):
            if not answers:
                logits = self.decoder.read(token, [1] * batch, cache, memory=source)
            else:
                logits = self.decoder.step(token, cache, memory=source)
            check_logits(logits, f"at token {len(answers)} of the answers")
            token = logits.argmax(-1) if choose is None else choose(logits)
            token = token.masked_fill(done, end)  # who is done goes on with nothing
            done |= token == end
            answers.append(token)
            if bool(done.all()):
                break
        rows = torch.stack(answers, 1).tolist()
        return [row[: row.index(end)] if end in row else row for row in rows]

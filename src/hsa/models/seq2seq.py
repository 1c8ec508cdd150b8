"""`Seq2Seq`: a hierarchical encoder of the prompt, and a decoder that attends to the prompt's tree."""

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
    """Configuration of a `Seq2Seq` model.

    Args:
        encoder: Configuration of the encoder of prompts.
        decoder: Configuration of the decoder of answers; its vocabulary includes `start` and `end`.
        modalities: Contents of the leaves of prompts, by name.
        kinds: Kinds of domains that have positions: "sequence", "grid", "graph", "table".
        keys: Keys of tables.
        start, end: Tokens before and after every answer; by default the last two of the vocabulary.
        top_k: Number of leaf families of the prompt that a token of the answer attends to leaf by leaf, the best for its
            query; the others are pooled on their tree. None for all: exact cross-attention.

    >>> from hsa.models import LanguageModelConfig
    >>> from hsa.nn import EncoderConfig, Modality
    >>> decoder = LanguageModelConfig(12, width=8, heads=2, layers=1)  # ten tokens, start and end
    >>> config = Seq2SeqConfig(EncoderConfig(width=8), decoder, {"text": Modality(tokens=10)})
    >>> Seq2SeqConfig.from_dict(config.to_dict()) == config
    True
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
                raise InvalidInput(name, got=token, expected=f"a token of a vocabulary of {size:,}")
            object.__setattr__(self, name, token % size)
        if self.top_k is not None:
            check_count("top_k", self.top_k, "0 or more leaf families, or None for all")

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values; `from_dict` rebuilds it."""
        return {**asdict(self), "decoder": self.decoder.to_dict()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Seq2SeqConfig:
        """Rebuild a configuration from the result of `to_dict`."""
        values = {
            **known_fields(Seq2SeqConfig, data),
            "encoder": config_from_dict(data["encoder"]),
            "decoder": LanguageModelConfig.from_dict(data["decoder"]),
            "modalities": {name: Modality(**known_fields(Modality, m)) for name, m in data["modalities"].items()},
        }
        for name in ("kinds", "keys"):
            if name in values:
                values[name] = tuple(values[name])
        return Seq2SeqConfig(**values)


class Seq2Seq(nn.Module):
    """An encoder–decoder: hierarchical attention over the prompt, flat or multiscale attention in the answer.

    Every decoder layer attends to the tokens of the answer so far, then to the leaves of the prompt, on their tree
    (Appendix G of the paper, first paragraph).

    Args:
        config: Configuration.

    >>> from hsa.models import LanguageModelConfig
    >>> from hsa.nn import EncoderConfig, Modality
    >>> from hsa.signals import collate, from_nested
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
                module.initialise()  # undo the initialisation of the decoder

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.decoder.device

    def encode(self, inputs: Inputs) -> Source:
        """Encode prompts for the decoder."""
        vectors, hierarchy = self.encoder(inputs)
        return Source.of(vectors, hierarchy, [1] * hierarchy.num_trees)

    def forward(self, inputs: Inputs, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return logits `[tokens, vocabulary]` of the token after each token of the answers.

        Args:
            inputs: Prompts, such as an `hsa.Batch`.
            tokens: `[tokens]` token ids of all answers, one after another, each beginning with the start token.
            lengths: Number of tokens of the answer to each prompt.
        """
        return nn.functional.linear(self._hidden(inputs, tokens, lengths), self.decoder.embedding.weight)

    def loss(self, inputs: Inputs, tokens: Tensor, targets: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the mean of −log p(target) over the tokens, without storing the logits of all tokens."""
        return mean_token_loss(self._hidden(inputs, tokens, lengths), self.decoder.embedding.weight, targets)

    def _hidden(self, inputs: Inputs, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        sizes = [int(length) for length in lengths]
        return self.decoder.hidden(tokens, sizes, memory=self.encode(inputs).with_lengths(sizes))

    @torch.no_grad()
    def generate(
        self, inputs: Inputs, *, max_new_tokens: int = 128, choose: Callable[[Tensor], Tensor] | None = None
    ) -> list[list[int]]:
        """Return the tokens of an answer to every prompt, without the start and end tokens.

        Args:
            inputs: Prompts. They are encoded once; every step appends a token to each answer, with cached keys and values.
            max_new_tokens: Maximum number of tokens of an answer.
            choose: Function of logits `[prompts, vocabulary]` that returns tokens `[prompts]`, such as `Sampling.draw`; by
                default the most likely ones.
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
            token = token.masked_fill(done, end)  # finished answers are padded
            done |= token == end
            answers.append(token)
            if bool(done.all()):
                break
        rows = torch.stack(answers, 1).tolist()
        return [row[: row.index(end)] if end in row else row for row in rows]

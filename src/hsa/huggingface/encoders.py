"""Frozen pre-trained encoders that embed tokens, texts and images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.huggingface.loading import check_complete, load_weights, loading, most_tokens, transformers_library
from hsa.signals import Grid, Leaf, Signal
from hsa.signals.batch import Batch
from hsa.signals.readers import read_image

_T5 = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
# Families whose first token is the class token and whose last tokens are the patches, row by row.
_VISION = ("vit", "deit", "vit_msn", "dinov2", "dinov2_with_registers")


class _Encoder:
    """A frozen model in evaluation mode."""

    model: Any
    width: int

    def _hold(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.width = model.config.hidden_size

    def to(self, device: torch.device | str) -> Self:
        """Move the encoder to a device."""
        self.model.to(device)
        return self


class TextEncoder(_Encoder):
    """A frozen pre-trained text encoder, such as BERT or the encoder of a T5.

    Args:
        path: Folder with config.json, weights and tokenizer, or a name on the hub, such as "intfloat/e5-base-v2".
        longest: Maximum number of tokens per input of the model, special tokens included; the model's limit by default.
            Longer texts are cut into windows.
        batch_tokens: Maximum number of tokens per batch, padding included.
        dtype: Dtype of the weights, such as `torch.bfloat16`. Vectors are float32.

    Attributes:
        tokenizer: Tokenizer of the model, for `read_text` and other readers.
        width: Width of the vectors.

    Raises:
        InvalidInput: The model cannot be loaded, lacks weights, or is not a text encoder.
        MissingExtra: transformers is not installed.

    >>> encoder = TextEncoder("intfloat/e5-base-v2")  # doctest: +SKIP
    >>> encoder.text_vectors(["The cat sat.", "The dog ran."], prefix="passage: ").shape  # doctest: +SKIP
    torch.Size([2, 768])
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        longest: int | None = None,
        batch_tokens: int = 16_384,
        dtype: torch.dtype = torch.float32,
    ):
        library, name = transformers_library(), str(path)
        with loading(name):
            config = library.AutoConfig.from_pretrained(name)
            _check_text_type(config, name)
            self.tokenizer = library.AutoTokenizer.from_pretrained(name)
            # If files are missing, transformers returns a tokenizer with an empty vocabulary.
            if set(self.tokenizer.get_vocab()) <= set(self.tokenizer.all_special_tokens):
                raise OSError("the tokenizer has no vocabulary")
            self._hold(_whole(getattr(library, _T5.get(config.model_type, "AutoModel")), name, dtype))
        self._before, self._after = _special_tokens(self.tokenizer)
        most = most_tokens(self.model, self.tokenizer)
        least = len(self._before) + len(self._after) + 1
        if longest is not None and not least <= longest <= most:
            raise InvalidInput("longest", expected=f"{least} to {most} tokens", got=longest)
        self.longest = longest or most
        self.batch_tokens = batch_tokens

    def token_vectors(self, batch: Batch, modality: str = "text") -> Batch:
        """Replace token ids by vectors in the context of their tree. Pass it as `transform` to a `Trainer`.

        The ids of a tree, in order, form one text. A text too long for the model is cut into windows of similar length. A
        batch without leaves of this modality is returned unchanged.

        Raises:
            InvalidInput: Leaves are not token ids of this model.
        """
        if modality not in batch.values:
            return batch
        ids = self._check_ids(batch.values[modality], modality)
        self.to(ids.device)
        bounds = np.searchsorted(batch.leaves[modality].cpu().numpy(), batch.hierarchy.structure.leaf_offsets)
        windows = [w for begin, end in pairwise(bounds.tolist()) if begin < end for w in self._windows(begin, end)]
        rows = ids.tolist()
        vectors = torch.empty(len(rows), self.width, device=ids.device)
        for window, states in self._states([rows[begin:end] for begin, end in windows]):
            begin, end = windows[window]
            vectors[begin:end] = states[len(self._before) : len(states) - len(self._after)]
        encoded = replace(batch, values={**batch.values, modality: vectors})
        encoded.__dict__["positions"] = batch.positions
        return encoded

    def text_vectors(self, texts: Sequence[str], *, prefix: str = "", normalize: bool = True) -> Tensor:
        """Return the mean over the token vectors of each text, special tokens included, `[texts, width]`.

        Args:
            texts: List of texts.
            prefix: Prefix of each text, such as "passage: " for E5.
            normalize: Whether to scale vectors to length 1.

        Raises:
            InvalidInput: A single string is passed, or a text has no tokens.
        """
        if isinstance(texts, str):
            raise InvalidInput("texts", got="one string", expected="a list of strings", fix="Wrap it: [text]")
        rows: list[list[int]] = []
        text_of: list[int] = []
        for i, text in enumerate(texts):
            ids = self.tokenizer.encode(prefix + text, add_special_tokens=False, verbose=False)
            if not (ids or self._before or self._after):
                raise InvalidInput(f"texts[{i}]", expected="at least one token", got="an empty text")
            for begin, end in self._windows(0, len(ids)):
                rows.append(ids[begin:end])
                text_of.append(i)
        device = next(self.model.parameters()).device
        sums = torch.zeros(len(texts), self.width, device=device)
        counts = torch.zeros(len(texts), 1, device=device)
        for window, states in self._states(rows):
            sums[text_of[window]] += states.sum(0)
            counts[text_of[window]] += len(states)
        means = sums / counts
        return F.normalize(means, dim=-1) if normalize else means

    def _windows(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Cut a text into windows of similar length that fit the model. An empty text is one empty window."""
        room = self.longest - len(self._before) - len(self._after)
        count = max(1, -(-(end - begin) // room))
        cuts = [begin + (end - begin) * i // count for i in range(count + 1)]
        return list(pairwise(cuts))

    @torch.no_grad()
    def _states(self, rows: list[list[int]]) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and last hidden states of each row, in any order, as rows of similar length share a batch."""
        device = next(self.model.parameters()).device
        whole = [[*self._before, *row, *self._after] for row in rows]
        lengths = np.array([len(row) for row in whole], np.int64)
        pad = self.tokenizer.pad_token_id or 0
        for batch in batch_by_length(lengths, self.batch_tokens):
            longest = int(lengths[batch[0]])
            ids = torch.tensor([whole[i] + [pad] * (longest - len(whole[i])) for i in batch.tolist()], device=device)
            size = torch.from_numpy(lengths[batch]).to(device)
            mask = (torch.arange(longest, device=device) < size[:, None]).long()
            states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            yield from ((i, states[row, : int(lengths[i])]) for row, i in enumerate(batch.tolist()))

    def _check_ids(self, values: Any, modality: str) -> Tensor:
        where, fix = f"values[{modality!r}]", "Read the text with tokenizer=encoder.tokenizer"
        if not isinstance(values, Tensor) or values.ndim != 1 or values.is_floating_point():
            raise InvalidInput(where, expected="one token id per leaf", got="leaves of another kind", fix=fix)
        size = self.model.get_input_embeddings().num_embeddings
        low, high = (int(bound) for bound in values.aminmax())
        if low < 0 or high >= size:
            raise InvalidInput(
                where, expected=f"token ids from 0 to {size - 1}", got=f"ids from {low} to {high}", fix=fix
            )
        return values


class ImageEncoder(_Encoder):
    """A frozen pre-trained vision transformer: ViT, DeiT or DINOv2.

    Images are paths, bytes, Pillow images or pixels, as for `read_image`.

    Args:
        path: Folder with config.json, preprocessor_config.json and weights, or a name on the hub, such as
            "google/vit-base-patch16-224-in21k".
        batch_size: Number of images per batch.
        dtype: Dtype of the weights. Vectors are float32.

    Attributes:
        processor: Image processor of the model.
        width: Width of the vectors.

    Raises:
        InvalidInput: The model cannot be loaded, lacks weights, or is not a vision transformer.
        MissingExtra: transformers is not installed.

    >>> encoder = ImageEncoder("google/vit-base-patch16-224-in21k")  # doctest: +SKIP
    >>> encoder.image_vectors(["a.jpg", "b.jpg"]).shape  # doctest: +SKIP
    torch.Size([2, 768])
    """

    def __init__(self, path: str | PathLike[str], *, batch_size: int = 32, dtype: torch.dtype = torch.float32):
        library, name = transformers_library(), str(path)
        with loading(name):
            config = library.AutoConfig.from_pretrained(name)
            if config.model_type not in _VISION:
                raise InvalidInput(
                    name, got=f"a model of type {config.model_type!r}", expected=f"one of {', '.join(_VISION)}"
                )
            self.processor = library.AutoImageProcessor.from_pretrained(name)
            self._hold(_whole(library.AutoModel, name, dtype))
        self.batch_size = batch_size

    def image_vectors(self, images: Sequence[Any]) -> Tensor:
        """Return the vector of the class token of each image, `[images, width]`.

        Raises:
            InvalidInput: An image cannot be read.
        """
        return self._vectors(images, grid=False)

    def patch_vectors(self, images: Sequence[Any]) -> Tensor:
        """Return the vectors of the patches, `[images, rows, columns, width]`. Raise errors as `image_vectors` does."""
        return self._vectors(images, grid=True)

    def read_image(self, picture: Any, *, grid: bool = False, where: str | None = None) -> Signal | Leaf:
        """Return an image as a leaf of modality "image". Pass it as `image_reader` to other readers.

        Args:
            picture: Image.
            grid: Whether to return a `Grid` with one leaf per patch instead of one leaf for the image.
            where: Name of the image in error messages.

        Raises:
            InvalidInput: The image cannot be read.
        """
        vectors = self._vectors([picture], grid, where)[0].cpu()
        return Signal.of(vectors, "image", Grid(vectors.shape[:2])) if grid else Leaf(vectors, "image")

    @torch.no_grad()
    def _vectors(self, images: Sequence[Any], grid: bool, where: str | None = None) -> Tensor:
        if isinstance(images, (str, bytes, PathLike)):
            raise InvalidInput("images", expected="a list of images", got="one image", fix="Wrap it: [image]")
        weight = next(self.model.parameters())
        parts = [torch.empty(0, *((0, 0) if grid else ()), self.width, device=weight.device)] if not images else []
        for begin in range(0, len(images), self.batch_size):
            pixels = [_pixels(image, where) for image in images[begin : begin + self.batch_size]]
            inputs = self.processor(pixels, return_tensors="pt", input_data_format="channels_last")["pixel_values"]
            states = self.model(pixel_values=inputs.to(weight.device, weight.dtype)).last_hidden_state.float()
            rows, columns = (side // self.model.config.patch_size for side in inputs.shape[-2:])
            parts.append(states[:, -rows * columns :].unflatten(1, (rows, columns)) if grid else states[:, 0])
        return torch.cat(parts)


def _pixels(picture: Any, where: str | None) -> np.ndarray:
    """Read an image as RGB, uint8 `[height, width, 3]`."""
    signal = read_image(picture, patch=1, largest=1 << 20, where=where)
    assert isinstance(signal.domain, Grid)
    assert isinstance(signal.values, Tensor)
    return signal.values.reshape(*signal.domain.shape, 3).numpy()


def _whole(kind: Any, name: str, dtype: torch.dtype) -> Any:
    """Load a model and check that no weights are missing, except for the pooler's, which is not used."""
    model, missing = load_weights(kind, name, dtype)
    check_complete(name, model, missing)
    return model


def _check_text_type(config: Any, name: str) -> None:
    """Refuse models that are not bidirectional: all but masked language models and the encoder of a T5."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    bidirectional = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not (
        config.is_encoder_decoder or getattr(config, "is_decoder", False)
    )
    if not bidirectional and config.model_type not in _T5:
        raise InvalidInput(
            name,
            expected="a text encoder, such as BERT, RoBERTa, MPNet, E5 or T5",
            got=f"a model of type {config.model_type!r}",
        )


def batch_by_length(lengths: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Yield batches of rows of similar length, longest first: at most `budget` tokens, and less than half padding per row.

    >>> [batch.tolist() for batch in batch_by_length(np.array([1, 9, 5, 2, 4, 8]), 20)]
    [[1, 5], [2, 4], [3, 0]]
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    begin = 0
    while begin < len(order):
        longest = int(falling[begin])
        enough = int(np.searchsorted(-falling, -longest / 2, side="right"))
        end = max(begin + 1, min(enough, begin + budget // longest))
        yield order[begin:end]
        begin = end


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids of the special tokens before and after a text."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    begin = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:begin], whole[begin + len(bare) :]

"""`load`: a trained model, its tokenizer and its classes from a folder."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

import torch

from hsa.models.folders import model_folder
from hsa.models.saved import LANGUAGE_MODEL, SEQ2SEQ, TRANSFORMERS, kind_of
from hsa.training.inference import LoadedClassifier
from hsa.training.language_model.inference import LoadedLanguageModel
from hsa.training.loaded_model import LoadedModel
from hsa.training.seq2seq.inference import LoadedSeq2Seq
from hsa.training.text_classifier import LoadedTextClassifier


def load(folder: str | PathLike[str], device: torch.device | str = "cpu") -> LoadedModel:
    """Load a trained model together with its tokenizer and its classes.

    Args:
        folder: Folder of a model, or of a run of `hsa train`, which stands for the first model of the run; or a classifier
            of transformers, as `hsa finetune` and `hsa convert` save it. A converted one attends over its trees.
        device: Device to load the model to.

    Returns:
        A `LoadedModel`: classifiers `predict` and `predict_proba` for texts or rows, and those of `hsa train` also `embed`
        them; encoder–decoders `predict` answers; language models `generate` texts.

    Raises:
        InvalidInput: If the folder holds no model, several, or a damaged one; the message says what it holds.

    >>> import tempfile
    >>> from hsa.models import LanguageModel, LanguageModelConfig, save_language_model
    >>> from hsa.signals import train_tokenizer
    >>> tokenizer = train_tokenizer(["It was a dark and stormy night."], 280)
    >>> with tempfile.TemporaryDirectory() as folder:  # hsa train writes a folder of the same files
    ...     config = LanguageModelConfig(tokenizer.get_vocab_size(), width=8, heads=2, layers=1)
    ...     save_language_model(folder, LanguageModel(config), tokenizer)
    ...     model = load(folder)
    >>> text = model.generate("It was", max_new_tokens=5, seed=0)
    >>> text == "".join(model.stream("It was", max_new_tokens=5, seed=0))
    True
    """
    path = model_folder(Path(folder))
    kind = kind_of(path)
    if kind == LANGUAGE_MODEL:
        return LoadedLanguageModel.load(path, device)
    if kind == TRANSFORMERS:
        return LoadedTextClassifier.load(path, device)
    return LoadedSeq2Seq.load(path, device) if kind == SEQ2SEQ else LoadedClassifier.load(path, device)

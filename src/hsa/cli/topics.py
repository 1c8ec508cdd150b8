"""Headings of the options of `hsa train` and `hsa compare` in `--help-all`, by what a user wants to do."""

from __future__ import annotations

from hsa.cli.help import OWN

DATA = "Data"
INPUTS = "Pre-trained inputs"
MODEL = "Model"
TRAINING = "Training"
HARDWARE = "Hardware"
LANGUAGE = "Language models (--task lm)"
SEQ2SEQ = "Encoder–decoders (--task seq2seq)"
DOCUMENTS = "Document models of others (--models han, hat, transformer-xl)"
HEADS = "Research: head fusion and entmax"
MATCH3 = "Research: three-way attention (--task match3)"

TOPICS: dict[str, tuple[str, ...]] = {
    OWN: ("task", "models", "out", "resume", "overwrite", "quick", "json", "seed"),
    DATA: ("text", "label", "number", "image", "validation", "test", "example"),
    INPUTS: ("word_vectors", "encoder", "image_encoder"),
    MODEL: (),
    TRAINING: (),
    HARDWARE: ("cpu", "fsdp", "mixed_precision"),
    LANGUAGE: (),
    SEQ2SEQ: (),
    DOCUMENTS: (),
    HEADS: ("fusion", "shared_dim", "fusion_penalty", "entmax"),
    MATCH3: (),
}
"""The headings in order. Listed options come first there; others stand under the heading in the command's signature."""

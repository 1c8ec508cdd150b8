"""Small random classifiers, encoders and language models with tokenizers, and texts for them."""

import random

import torch

from hsa.huggingface.fidelity.examples import Examples
from hsa.huggingface.loading import save_model
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.tiny_models import DECODER, ENCODER, FAMILIES, WORDS, transformers, word_tokenizer

LONGEST = 61
CHEAP = LayerSettings(kind="multiscale", branching=(4, 2), top_k=0)
NEAR = LayerSettings(kind="multiscale", branching=(4, 2), near=1, top_k=0)
CLUSTERED = LayerSettings(branching=(4, 2), top_k=2)


def tokenizer():
    result = word_tokenizer()
    result.model_max_length = LONGEST
    result.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return result


def classifier(kind="Bert", seed=1, **changes):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**ENCODER, **changes})
    return getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()


def language_model(seed=1, **changes):
    torch.manual_seed(seed)
    return FAMILIES["llama"](**{**DECODER, **changes}).eval()


def save(folder, model):
    save_model(folder, model, tokenizer())
    return folder


def text(generator, least=41, most=57):
    return " ".join(generator.choices(WORDS, k=generator.randint(least, most)))


def rows(count=12, seed=0, **columns):
    """Return texts of known words, labelled 0 and 1 in turn; `columns` are added to all rows."""
    generator = random.Random(seed)
    return [{"text": text(generator), "label": i % 2, **columns} for i in range(count)]


def examples(count=12, seed=0, labels=True, parts=1, least=41, most=57):
    generator = random.Random(seed)
    texts = [tuple(text(generator, least, most) for _ in range(parts)) for _ in range(count)]
    return Examples("small", texts, [i % 2 for i in range(count)] if labels else None)


def learnable(count=48, seed=0):
    """Return texts about cats or dogs, with the animal as label."""
    generator = random.Random(seed)
    texts = [
        (" ".join([*["cat cat", "dog dog"][i % 2].split(), *generator.choices(WORDS[8:], k=5)]),) for i in range(count)
    ]
    return Examples("learnable", texts, [i % 2 for i in range(count)])

"""Train a classifier of documents in plain PyTorch.

    python examples/classifier.py

It learns which package of the Python standard library a source file comes from. Replace `load` by your own texts and
labels. For training with validation, baselines, checkpoints and reports, see `hsa train`.
"""

import json.decoder
import random
from pathlib import Path

import torch
import torch.nn.functional as F

import hsa
from hsa.models import Classifier, ModelConfig
from hsa.nn import EncoderConfig, Modality
from hsa.signals import read_text, train_tokenizer

PACKAGES = ("email", "asyncio", "json", "unittest", "xml")


def load() -> list[tuple[str, int]]:
    """Return texts and classes: paragraphs of source files."""
    library = Path(json.__file__).parents[1]
    examples = []
    for label, package in enumerate(PACKAGES):
        text = "\n\n".join(path.read_text() for path in sorted((library / package).rglob("*.py")))
        paragraphs = [part for part in text.split("\n\n") if len(part) > 80]
        examples += [("\n\n".join(paragraphs[i : i + 4]), label) for i in range(0, min(len(paragraphs), 320), 4)]
    return examples


def main(epochs: int = 4) -> float:
    torch.manual_seed(0)
    random.seed(0)
    examples = load()
    random.shuffle(examples)
    cut = len(examples) * 4 // 5
    tokenizer = train_tokenizer([text for text, _ in examples[:cut]], 2000)
    # A tree per text: paragraphs, their sentences, their tokens.
    data = [(read_text(text, tokenizer), label) for text, label in examples]
    train, test = data[:cut], data[cut:]

    config = ModelConfig(
        EncoderConfig(width=64, heads=4, layers=1),  # kind="multiscale", "clustered", "flat", … for other attention
        {"text": Modality(tokens=tokenizer.get_vocab_size())},
        outputs=len(PACKAGES),
    )
    model = Classifier(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        model.train()
        random.shuffle(train)
        for start in range(0, len(train), 16):
            signals, labels = zip(*train[start : start + 16], strict=True)
            loss = F.cross_entropy(model(hsa.collate(signals)), torch.tensor(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(hsa.collate([signal for signal, _ in test]))
        accuracy = (logits.argmax(-1) == torch.tensor([label for _, label in test])).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()

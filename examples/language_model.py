"""A language model with multiscale attention: train it, then generate text with a small cache.

    python examples/language_model.py [TEXT]

TEXT is a file; by default, the text of this library's licence serves as a tiny book. For training on more than a toy, see
`hsa train --task lm`.
"""

import sys
from pathlib import Path

import torch

from hsa.generation import Sampling, generate
from hsa.models import LanguageModel, LanguageModelConfig
from hsa.signals import train_tokenizer


def main(path: str | Path = Path(__file__).parents[1] / "LICENSE", steps: int = 60) -> str:
    torch.manual_seed(0)
    text = Path(path).read_text()
    tokenizer = train_tokenizer([text], 600)
    tokens = torch.tensor(tokenizer.encode(text).ids)

    config = LanguageModelConfig(tokenizer.get_vocab_size(), width=128, heads=4, layers=2, branching=(8, 4))
    model = LanguageModel(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokens):,} tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    length, batch = 256, 4
    for step in range(1, steps + 1):
        starts = torch.randint(len(tokens) - length, (batch,)).tolist()
        inputs = torch.cat([tokens[start : start + length] for start in starts])  # sequences one after another
        targets = torch.cat([tokens[start + 1 : start + length + 1] for start in starts])
        loss = model.loss(inputs, targets, [length] * batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    model.eval()
    stream = generate(model, tokenizer, "The License", max_new_tokens=60, sampling=Sampling(temperature=0.7, seed=0))
    written = ""
    print("The License", end="")
    for piece in stream:  # token by token; the cache keeps O(log N) keys
        print(piece, end="", flush=True)
        written += piece
    print()
    return written


if __name__ == "__main__":
    main(*sys.argv[1:2])

"""The encoder–decoder: causal in its answers, the same from caches, each prompt on its own."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from hsa import collate
from hsa.errors import InvalidInput
from hsa.generation.sampling import Sampling
from hsa.models.language_model import LanguageModelConfig
from hsa.models.saved import load_language_model, load_seq2seq, save_seq2seq
from hsa.models.seq2seq import Seq2Seq, Seq2SeqConfig
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals.readers.nested import from_nested
from tests.model_inputs import exact
from tests.sealing import reseal

TOKENS = 19
KINDS = [
    ("hierarchical", "flat", None),
    ("hierarchical", "multiscale", 1),
    ("multiscale", "multiscale", None),
    ("multiscale", "flat", 2),
    ("clustered", "flat", 1),
    ("flat", "flat", 1),
]


def config(kind: str = "hierarchical", attention: str = "flat", top_k: int | None = None) -> Seq2SeqConfig:
    sizes = {"width": 13, "heads": 3, "head_dim": 5, "layers": 2, "position_width": 22, "position_dim": 2}
    encoder = EncoderConfig(**sizes, kind=kind, position_input=True, dropout=0.0, group=2, top_k=1)
    decoder = LanguageModelConfig(
        TOKENS + 2, width=12, heads=2, layers=2, attention=attention, branching=(3, 2), near=1, positions="both"
    )
    return Seq2SeqConfig(encoder, decoder, {"text": Modality(tokens=TOKENS)}, top_k=top_k)


def make(*kinds) -> Seq2Seq:
    return exact(Seq2Seq(config(*kinds)))


def prompts() -> list:
    nested = ([[3, 1, 4], [1, 5], [9, 2, 6, 8]], [[7, 2], [[6, 5, 3], [0, 11]], [12, 13, 14]], [[10, 18, 15]])
    return [from_nested(x, "text") for x in nested]


def answers(lengths: list[int], seed: int = 1) -> Tensor:
    return torch.randint(TOKENS, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kinds", KINDS)
def test_later_tokens_of_the_answer_are_not_used(kinds) -> None:
    """The Jacobian of the logits with respect to later tokens is exactly zero, and not with respect to earlier ones."""
    model, lengths = make(*kinds), [8, 5, 6]
    tokens = answers(lengths)
    embedded = model.decoder.embedding(tokens).detach().requires_grad_()
    model.decoder.embedding.forward = lambda _: embedded
    logits = model(collate(prompts()), tokens, lengths)
    first = 0
    for length in lengths:
        for i in range(first, first + length):
            (slope,) = torch.autograd.grad(logits[i].square().sum(), embedded, retain_graph=True)
            reached = slope.abs().sum(-1) > 0
            assert reached[first : i + 1].all()
            assert not reached[i + 1 :].any()
            assert not reached[:first].any()
        first += length


@pytest.mark.parametrize("kinds", KINDS)
def test_generation_token_by_token_equals_the_full_pass(kinds) -> None:
    model, steps = make(*kinds).float(), 17
    batch = collate(prompts())
    tokens = torch.stack([answers([steps], seed) for seed in range(3)])
    full = model(batch, tokens.flatten(), [steps] * 3).unflatten(0, (3, steps))
    source = model.encode(batch)
    cache = model.decoder.new_cache(3)
    with torch.no_grad():
        rows = [model.decoder.read(tokens[:, 0], [1] * 3, cache, memory=source)]
        rows += [model.decoder.step(tokens[:, t], cache, memory=source) for t in range(1, steps)]
    torch.testing.assert_close(torch.stack(rows, 1), full.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kinds", KINDS)
def test_an_answer_does_not_depend_on_the_batch(kinds) -> None:
    model, lengths = make(*kinds), [4, 3, 6]
    tokens = answers(lengths).split(lengths)
    together = model(collate(prompts()), torch.cat(tokens), lengths).split(lengths)
    for prompt, answer, row in zip(prompts(), tokens, together, strict=True):
        torch.testing.assert_close(model(collate([prompt]), answer, [len(answer)]), row)


@pytest.mark.parametrize("kinds", [k for k in KINDS if k[0] != "clustered"])
def test_gradients_reach_the_encoder(kinds) -> None:
    model, lengths = make(*kinds), [4, 3, 6]
    tokens = answers(lengths)
    model.loss(collate(prompts()), tokens, tokens.roll(-1), lengths).backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    allowed = {"norm_k.bias"}  # moves all logits of a query alike
    if kinds == ("flat", "flat", 1):  # all leaves of a flat tree hang under its root: nothing is ever pooled
        allowed.add("cross.pooled_bias")
    read = {name for name in silent if name.startswith("encoder.") or ".cross." in name}
    assert not {name for name in read if not name.endswith(tuple(allowed))}


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, lengths = make(), [4, 3, 6]
    tokens = answers(lengths)
    targets = tokens.roll(-1)
    logits = model(collate(prompts()), tokens, lengths)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(model.loss(collate(prompts()), tokens, targets, lengths), expected)


def test_generate_takes_the_most_likely_token_until_the_end() -> None:
    model = make("hierarchical", "multiscale", 1)
    batch, end = collate(prompts()), model.config.end
    result = model.generate(batch, max_new_tokens=7)
    for i, answer in enumerate(result):
        tokens: list[int] = [model.config.start]
        alone = collate([prompts()[i]])
        for _ in range(7):
            tokens.append(int(model(alone, torch.tensor(tokens), [len(tokens)])[-1].argmax()))
            if tokens[-1] == end:
                break
        assert answer == [t for t in tokens[1:] if t != end]


def test_generate_stops_when_all_are_done_and_cuts_at_the_end() -> None:
    model, calls = make(), []
    end = model.config.end
    script = [[3, end, 5], [4, 7, end], [end, 7, 7]]

    def choose(logits: Tensor) -> Tensor:
        assert logits.shape == (3, TOKENS + 2)
        calls.append(1)
        return torch.tensor(script[len(calls) - 1])

    assert model.generate(collate(prompts()), max_new_tokens=9, choose=choose) == [[3, 4], [], [5]]
    assert len(calls) == 3


def test_generate_samples() -> None:
    model, batch = make(), collate(prompts())
    sampling = Sampling(temperature=3.0, seed=5)

    def write() -> list[list[int]]:
        draws = sampling.generator()
        return model.generate(batch, max_new_tokens=9, choose=lambda logits: sampling.draw(logits, draws))

    assert write() == write() != model.generate(batch, max_new_tokens=9)


def test_damaged_weights_raise() -> None:
    model = make()
    with torch.no_grad():
        model.encoder.embedding.tables["text"].weight[3] = torch.nan  # a token of the first prompt
    with pytest.raises(InvalidInput, match="not finite at token 0"):
        model.generate(collate(prompts()))


def test_saved_and_loaded(tmp_path) -> None:
    model = Seq2Seq(config("multiscale", "multiscale", 1)).eval()
    save_seq2seq(tmp_path, model)
    again = load_seq2seq(tmp_path)
    assert again.config == model.config
    tokens = answers([3, 2, 4])
    assert torch.equal(again(collate(prompts()), tokens, [3, 2, 4]), model(collate(prompts()), tokens, [3, 2, 4]))
    with pytest.raises(InvalidInput, match="hsa train --task lm"):
        load_language_model(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "colour": "red"}))
    reseal(tmp_path)
    with pytest.raises(InvalidInput, match="colour"):
        load_seq2seq(tmp_path)


def test_bad_input() -> None:
    model, batch = make(), collate(prompts())
    with pytest.raises(InvalidInput, match="one for each tree"):
        model(batch, answers([2, 3]), [2, 3])
    with pytest.raises(InvalidInput, match="tokens"):
        model(batch, answers([2, 3, 4]), [2, 3, 5])
    with pytest.raises(InvalidInput, match="max_new_tokens"):
        model.generate(batch, max_new_tokens=0)
    with pytest.raises(InvalidInput, match="vocabulary"):
        Seq2SeqConfig(EncoderConfig(), LanguageModelConfig(7), {"text": Modality(tokens=5)}, end=7)
    with pytest.raises(InvalidInput, match="top_k"):
        Seq2SeqConfig(EncoderConfig(), LanguageModelConfig(7), {"text": Modality(tokens=5)}, top_k=-1)

"""The language model of Transformer-XL gives the same result read in parts, step by step or at once."""

import io
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.baselines.transformer_xl import encoder as transformer_xl
from hsa.baselines.transformer_xl.encoder import SegmentMemory
from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageConfig, TransformerXLLanguageModel
from hsa.errors import InvalidInput
from hsa.generation.generate_text import generate
from hsa.generation.sampling import Sampling
from hsa.models.memory import set_test_memory
from hsa.models.saved import CONFIG as CONFIG_FILE
from hsa.models.saved import load_language_model, save_language_model
from hsa.signals.readers.tokens import train_tokenizer
from hsa.training.language_model.inference import LoadedLanguageModel
from tests.model_inputs import exact
from tests.sealing import reseal

TOKENS = 37
CONFIG = TransformerXLLanguageConfig(TOKENS, width=14, heads=2, layers=3, feed_forward=11, segment=5, memory=3)


def model(**changes):
    return exact(TransformerXLLanguageModel(replace(CONFIG, **changes)))


def texts(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(TOKENS, (n,), generator=draw) for n in lengths]


def close(result, wanted):
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-10)


@st.composite
def parts(draw):
    """Draw the lengths of the parts of some texts; every text has at least one token in each part."""
    count, batch = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    return [[draw(st.integers(1, 9)) for _ in range(batch)] for _ in range(count)]


@pytest.mark.parametrize("projected", [False, True])
@given(parts(), st.integers(1, 6), st.integers(0, 8))
def test_reading_in_parts_equals_reading_at_once(projected, sizes, segment, memory):
    made = model(segment=segment, memory=memory)
    whole = texts(*map(sum, zip(*sizes, strict=True)))
    wanted = made(torch.cat(whole), [len(text) for text in whole]).split([len(text) for text in whole])
    state, done = made.new_memory(len(whole), projected=projected), [0] * len(whole)
    for lengths in sizes:
        now = [text[a : a + n] for text, a, n in zip(whole, done, lengths, strict=True)]
        with torch.set_grad_enabled(not projected):
            hidden, state = made.extend(torch.cat(now), lengths, state)
        for text, logits, a, n in zip(wanted, made._logits(hidden).split(lengths), done, lengths, strict=True):
            close(logits, text[a : a + n])
        done = [a + n for a, n in zip(done, lengths, strict=True)]
        assert state.seen == tuple(done)
        assert all(rows.shape == (sum(state.kept), (1 + projected) * CONFIG.width) for rows in state.rows)
        assert not any(rows.requires_grad for rows in state.rows)
        assert max(state.kept) <= memory + segment - 1


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 6))
def test_long_memory_equals_one_long_segment(length, more, segment):
    (text,) = texts(length + more)
    made, long = model(segment=segment, memory=100), model(segment=100, memory=0)
    close(made(text, [len(text)]), long(text, [len(text)]))
    cache = made.new_cache()
    with torch.no_grad():
        steps = [made.read(text[:length], [length], cache)]
        steps += [made.step(token[None], cache) for token in text[length:]]
    close(torch.cat(steps), long(text, [len(text)])[length - 1 :])
    assert cache.lengths == [length + more]
    assert cache.memory().leaves_kept


def test_gradients_are_causal_and_stay_inside_a_segment():
    made, lengths = model(), [19, 4]
    tokens = torch.randperm(TOKENS)[: sum(lengths)]

    def outputs(weight):
        return torch.func.functional_call(_Hidden(made), {"model.embedding.weight": weight}, (tokens, lengths))

    slopes = torch.autograd.functional.jacobian(outputs, made.embedding.weight.detach())[:, tokens].abs().amax(-1)
    text, position = torch.repeat_interleave(torch.tensor(lengths)), torch.cat([torch.arange(n) for n in lengths])
    together = (text[:, None] == text) & (position[:, None] // CONFIG.segment == position // CONFIG.segment)
    assert torch.equal(slopes > 0, together & (position <= position[:, None]))


class _Hidden(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, lengths):
        return self.model.extend(tokens, lengths)[0].sum(-1)


def test_loss_is_the_cross_entropy_and_returns_the_memory():
    made = model()
    (text,) = texts(31)
    logits = made(text[:-1], [30])
    wanted = torch.nn.functional.cross_entropy(logits, text[1:], reduction="none")
    first, state = made.loss(text[:12], text[1:13], [12], mean=False)
    second, state = made.loss(text[12:30], text[13:31], [18], state, mean=False)
    close(torch.cat([first, second]), wanted)
    close(made.loss(text[:-1], text[1:], [30])[0], wanted.mean())
    assert state.seen == (30,)


def test_keys_of_the_memory_use_the_current_weights_unless_projected():
    made = model(layers=1)
    (text,) = texts(10)
    _, state = made.extend(text[:5], [5])
    _, keys = made.extend(text[:5], [5], made.new_memory(projected=True))
    with torch.no_grad():
        made.layers.stack[0].attention.key_value.weight.mul_(2)
    wanted = made.extend(text, [10])[0][5:]
    close(made.extend(text[5:], [5], state)[0], wanted)
    assert (made.extend(text[5:], [5], keys)[0] - wanted).abs().max() > 1e-3


def test_memory_is_saved_with_torch():
    made = model()
    tokens = torch.cat(texts(12, 7))
    _, state = made.extend(tokens, [12, 7])
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    again = SegmentMemory.from_state_dict(torch.load(file, weights_only=True))
    assert (again.kept, again.seen, again.projected) == (state.kept, state.seen, False)
    for ours, theirs in zip(again.rows, state.rows, strict=True):
        assert torch.equal(ours, theirs)


def test_plans_of_equal_lengths_are_cached():
    made, tokens = model(memory=5), torch.cat(texts(5, 5))
    state = None
    for _ in range(2):
        _, state = made.extend(tokens, [5, 5], state)
    known = len(made._plans)
    for _ in range(5):
        _, state = made.extend(tokens, [5, 5], state)
    assert len(made._plans) == known
    for i in range(1, 40):
        made(texts(i)[0], [i])
    assert len(made._plans) <= 16


def test_generation_neither_builds_plans_on_the_host_nor_evicts_cached_ones(monkeypatch):
    made, cache, tokens = model(), model().new_cache(2), torch.cat(texts(7, 7))
    with torch.no_grad():
        made.read(tokens, [7, 7], cache)
        known = dict(made._plans)
        monkeypatch.setattr(transformer_xl, "plan_segments", None)
        for _ in range(20):  # across several segments
            made.step(tokens[:2], cache)
    assert dict(made._plans) == known


@pytest.mark.parametrize("lengths", [[7, 7], [7, 4], [6, 1]])
@pytest.mark.parametrize("shorter", [0, 1, 8])
def test_memory_length_changed_during_generation(lengths, shorter):
    """The next token attends to only part of a memory that was kept for a longer length."""
    made, tokens = model(memory=8), torch.cat(texts(*lengths))
    result = []
    for whole in (True, False):
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if whole:
                patch.setattr(transformer_xl, "_is_uniform_step", lambda *state: False)
            made.layers.lengths = (8, None)
            cache = made.new_cache(2)
            made.read(tokens, lengths, cache)
            set_test_memory(made, shorter)
            result.append(torch.stack([made.step(tokens[:2], cache) for _ in range(9)]))
    close(result[0], result[1])


def test_memory_of_the_cache():
    made, cache = model(), model().new_cache(2)
    with torch.no_grad():
        made.read(torch.cat(texts(22, 8)), [22, 8], cache)
    memory = cache.memory()
    kept = (3 + 2) + (3 + 3)  # memory and unfinished segment of each text
    assert memory.bytes == kept * 2 * CONFIG.width * 8 * CONFIG.layers
    assert memory.flat_bytes == 30 * 2 * CONFIG.width * 8 * CONFIG.layers
    assert not memory.leaves_kept


def test_save_load_and_generate(tmp_path):
    tokenizer = train_tokenizer(["the cat sat on the mat"], 270)
    saved = model(vocabulary=tokenizer.get_vocab_size(), test_memory=7, max_length=40)
    save_language_model(tmp_path, saved.float(), tokenizer)
    about = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert (about["model"], about["architecture"]) == ("language model", "transformer-xl")
    assert about["test_memory"] == 7
    loaded = LoadedLanguageModel.load(tmp_path)
    made, result = loaded.model, loaded.tokenizer
    assert made.config == saved.config
    assert not made.training
    stream = generate(made, result, "the cat", max_new_tokens=90, sampling=Sampling(temperature=0))
    text = "".join(stream)
    assert text == result.decode(stream.ids, skip_special_tokens=False)
    assert stream.reason == "max_length"
    whole = torch.tensor([*stream.prompt, *stream.ids])
    assert len(whole) == 41  # the last token is not read
    likeliest = saved(whole[:-1], [40]).argmax(-1).tolist()
    assert stream.ids == likeliest[len(stream.prompt) - 1 :]
    assert "flat cache" in str(stream.cache.memory())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**about, "branching": 3}))
    reseal(tmp_path)
    with pytest.raises(InvalidInput, match="unknown field 'branching'"):
        load_language_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 0}, "vocabulary: expected .*, got 0"),
        ({"memory": -1}, "memory: expected .*, got -1"),
        ({"segment": 0}, "segment: expected .*, got 0"),
        ({"activation": "relu"}, "activation: expected one of swiglu, gelu, got 'relu'"),
        ({"max_length": 0}, "max_length: expected .*, got 0"),
        ({"heads": 4}, "heads: expected .*, got 4 heads .* 14"),
    ],
)
def test_invalid_sizes(changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(CONFIG, **changes)


def test_mismatched_texts_and_memories():
    made, tokens = model(max_length=9), torch.cat(texts(5, 3))
    with pytest.raises(InvalidInput, match="at least one"):
        made(tokens, [8, 0])
    with pytest.raises(InvalidInput, match="memory: expected the memory of 2 texts, got 3"):
        made.extend(tokens, [5, 3], made.new_memory(3))
    with pytest.raises(InvalidInput, match="memory: expected 3 layers of width 14, got the memory of another model"):
        made.extend(tokens, [5, 3], model(layers=1).new_memory(2))
    with pytest.raises(InvalidInput, match="memory: expected 3 layers of width 14, got the memory of another model"):
        made.extend(tokens, [5, 3], model(width=10).new_memory(2))
    _, state = made.extend(tokens, [5, 3])
    with pytest.raises(InvalidInput, match=r"at most 9.* 10 tokens"):
        made.extend(tokens, [5, 3], state)

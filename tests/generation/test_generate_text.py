import pytest
import torch

from hsa.errors import InvalidInput
from hsa.generation.generate_text import END, generate
from hsa.generation.sampling import Sampling
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.signals.readers.tokens import train_tokenizer
from tests.model_inputs import exact

TOKENIZER = train_tokenizer(["the cat sat on the mat"], 270, special_tokens=[END])
GREEDY = Sampling(temperature=0)


def model(**changes):
    sizes = {"width": 12, "heads": 2, "layers": 2, "branching": (3, 2), "attention": ("multiscale", "flat")}
    return exact(LanguageModel(LanguageModelConfig(TOKENIZER.get_vocab_size(), **{**sizes, **changes})))


def saying(text, end=False):
    """A model that writes a text whatever it reads: its logits come from a list."""
    ids = [*TOKENIZER.encode(text).ids, *([TOKENIZER.token_to_id(END)] if end else [])]
    made = model()
    script = iter(torch.nn.functional.one_hot(torch.tensor(ids), made.config.vocabulary).double()[:, None])
    made._logits = lambda hidden: next(script)
    return made


@torch.no_grad()
def test_the_likeliest_text_is_that_of_the_full_pass():
    made, prompt = model(), "the cat"
    stream = generate(made, TOKENIZER, prompt, max_new_tokens=30, sampling=GREEDY)
    text = "".join(stream)
    whole = torch.tensor([*stream.prompt, *stream.ids])
    likeliest = made(whole, [len(whole)]).argmax(-1).tolist()
    assert stream.prompt == TOKENIZER.encode(prompt).ids
    assert stream.ids == likeliest[len(stream.prompt) - 1 : -1]
    assert text == TOKENIZER.decode(stream.ids, skip_special_tokens=False)
    assert stream.cache.lengths == [len(whole) - 1]  # nothing is asked after the last token
    assert stream.reason == "tokens"
    assert stream.seconds > 0


def test_the_same_seed_gives_the_same_text():
    made = model()
    first, second, other = (
        "".join(generate(made, TOKENIZER, "the", max_new_tokens=20, sampling=Sampling(seed=seed))) for seed in (3, 3, 4)
    )
    assert first == second != other


def test_the_end_of_the_document_ends_the_text():
    stream = generate(saying("on a mat", end=True), TOKENIZER, "the cat sat ", sampling=GREEDY)
    assert "".join(stream) == "on a mat"
    assert stream.reason == "end"


def test_stop_strings_end_the_text():
    stream = generate(saying("on a mat. And"), TOKENIZER, "the cat", sampling=GREEDY, stop=["xyz", "t. "])
    assert "".join(stream) == "on a ma"
    assert stream.reason == "stop"


def test_text_that_was_held_back_comes_at_the_end():
    made = saying("on😀 E")
    stream = generate(
        made, TOKENIZER, "a", max_new_tokens=len(TOKENIZER.encode("on😀 E").ids), sampling=GREEDY, stop=["END"]
    )
    assert list(stream)[-1] == "E"


def test_the_max_length_of_the_model_ends_the_text():
    stream = generate(model(max_length=9), TOKENIZER, "the", max_new_tokens=50, sampling=GREEDY)
    list(stream)
    assert stream.reason == "max_length"
    assert stream.cache.lengths == [9]
    assert len(stream.prompt) + len(stream.ids) == 10  # the token after the last position is known too


def test_attributes_can_be_read_after_an_interruption():
    stream = generate(model(), TOKENIZER, "the", max_new_tokens=50, sampling=GREEDY)
    next(stream)
    assert stream.reason == "running"
    assert len(stream.ids) >= 1
    assert stream.cache.memory().flat_bytes > 0


def test_generation_keeps_no_gradients():
    stream = generate(model(), TOKENIZER, "the", max_new_tokens=3)
    list(stream)
    assert not any(part.keys.requires_grad for part in stream.cache.parts.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "prompt: expected .*, got an empty text"),
        (
            {"prompt": "the cat sat on the mat"},
            "prompt: expected at most 3, the max_length of the model, got 6 tokens",
        ),
        ({"max_new_tokens": 0}, "max_new_tokens: expected .*, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: expected .*, got 2.5"),
        ({"stop": [""]}, "stop: expected"),
    ],
)
def test_invalid_arguments(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        generate(model(max_length=3), TOKENIZER, **{"prompt": "a", **arguments})


def test_a_tokenizer_of_another_model():
    with pytest.raises(InvalidInput, match=r"tokenizer: expected .*, got 258 tokens"):
        generate(model(), train_tokenizer(["a"], 258, special_tokens=["<x>", "<y>"]), "a")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_raise_with_the_step(bad):
    made = model()
    steps = iter([0.0, 0.0, bad])
    plain = made._logits
    made._logits = lambda hidden: plain(hidden) + next(steps)
    stream = generate(made, TOKENIZER, "the", sampling=GREEDY)
    with pytest.raises(InvalidInput, match=r"logits: expected .*, got .* at step 2 \(token 3 of the text\)"):
        list(stream)
    assert len(stream.ids) == 2

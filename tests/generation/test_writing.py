import pytest
import torch

from hsa.errors import InvalidInput
from hsa.generation.sampling import Sampling
from hsa.generation.writing import END, generate
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
    writing = generate(made, TOKENIZER, prompt, tokens=30, sampling=GREEDY)
    text = "".join(writing)
    whole = torch.tensor([*writing.prompt, *writing.ids])
    likeliest = made(whole, [len(whole)]).argmax(-1).tolist()
    assert writing.prompt == TOKENIZER.encode(prompt).ids
    assert writing.ids == likeliest[len(writing.prompt) - 1 : -1]
    assert text == TOKENIZER.decode(writing.ids, skip_special_tokens=False)
    assert writing.cache.lengths == [len(whole) - 1]  # nothing is asked after the last token
    assert writing.reason == "tokens"
    assert writing.seconds > 0


def test_a_seed_writes_the_same_again():
    made = model()
    first, second, other = (
        "".join(generate(made, TOKENIZER, "the", tokens=20, sampling=Sampling(seed=seed))) for seed in (3, 3, 4)
    )
    assert first == second != other


def test_the_end_of_the_document_ends_it():
    writing = generate(saying("on a mat", end=True), TOKENIZER, "the cat sat ", sampling=GREEDY)
    assert "".join(writing) == "on a mat"
    assert writing.reason == "end"


def test_stop_strings_end_it():
    writing = generate(saying("on a mat. And"), TOKENIZER, "the cat", sampling=GREEDY, stop=["xyz", "t. "])
    assert "".join(writing) == "on a ma"
    assert writing.reason == "stop"


def test_what_was_held_back_comes_at_the_end():
    made = saying("on😀 E")
    writing = generate(made, TOKENIZER, "a", tokens=len(TOKENIZER.encode("on😀 E").ids), sampling=GREEDY, stop=["END"])
    assert list(writing)[-1] == "E"


def test_a_model_of_bounded_length_stops_there():
    writing = generate(model(max_length=9), TOKENIZER, "the", tokens=50, sampling=GREEDY)
    list(writing)
    assert writing.reason == "max_length"
    assert writing.cache.lengths == [9]
    assert len(writing.prompt) + len(writing.ids) == 10  # what follows the last place is known too


def test_interrupted_it_can_still_be_asked():
    writing = generate(model(), TOKENIZER, "the", tokens=50, sampling=GREEDY)
    next(writing)
    assert writing.reason == "running"
    assert len(writing.ids) >= 1
    assert writing.cache.memory().flat_bytes > 0


def test_nothing_is_kept_for_gradients():
    writing = generate(model(), TOKENIZER, "the", tokens=3)
    list(writing)
    assert not any(part.keys.requires_grad for part in writing.cache.parts.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "prompt: given an empty text"),
        ({"prompt": "the cat sat on the mat"}, "prompt: given .* expected at most 3, the max_length of the model"),
        ({"tokens": 0}, "tokens: given 0"),
        ({"tokens": 2.5}, "tokens: given 2.5"),
        ({"stop": [""]}, "stop: given"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        generate(model(max_length=3), TOKENIZER, **{"prompt": "a", **arguments})


def test_a_tokenizer_of_another_model():
    with pytest.raises(InvalidInput, match="tokenizer: given 258 tokens, expected"):
        generate(model(), train_tokenizer(["a"], 258, special_tokens=["<x>", "<y>"]), "a")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_name_the_step(bad):
    made = model()
    steps = iter([0.0, 0.0, bad])
    plain = made._logits
    made._logits = lambda hidden: plain(hidden) + next(steps)
    writing = generate(made, TOKENIZER, "the", sampling=GREEDY)
    with pytest.raises(InvalidInput, match=r"logits: given .* at step 2 \(token 3 of the text\)"):
        list(writing)
    assert len(writing.ids) == 2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.generation.sampling import Sampling

LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]).log()


def test_temperature_zero_takes_the_likeliest():
    assert Sampling(temperature=0, seed=1).draw(LOGITS).tolist() == [0, 3]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 99}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_probabilities_with_each_option(options, wanted):
    actual = Sampling(**options).probabilities(LOGITS)
    torch.testing.assert_close(actual, torch.tensor([wanted, wanted[::-1]], dtype=torch.float32))


@given(st.integers(0, 50), st.integers(0, 6), st.floats(0.05, 1))
def test_draws_are_among_the_tokens_with_probability(seed, top_k, top_p):
    sampling = Sampling(top_k=top_k, top_p=top_p, seed=seed)
    logits = torch.randn(31, 7, generator=torch.Generator().manual_seed(seed))
    drawn = sampling.draw(logits, sampling.generator())
    assert torch.equal(drawn, sampling.draw(logits, sampling.generator()))
    assert (sampling.probabilities(logits).gather(1, drawn[:, None]) > 0).all()


def test_without_a_seed_draws_differ():
    logits = torch.zeros(1, 2**20)
    assert Sampling().draw(logits, Sampling().generator()) != Sampling().draw(logits, Sampling().generator())


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(50, 3)
    assert (Sampling(seed=0).draw(logits) == 1).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", True),
    ],
)
def test_invalid_arguments(name, value):
    with pytest.raises(InvalidInput, match=f"^{name}: expected"):
        Sampling(**{name: value})

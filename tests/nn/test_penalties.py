"""Penalty that keeps tokens from all preferring the same head: its value, its collection and its effect."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.nn.attention import Hierarchical
from hsa.nn.bottom_up import bottom_up
from hsa.nn.grouped_linear import Groups
from hsa.nn.layer import EncoderLayer
from hsa.nn.penalties import add_penalty, collecting_penalties
from hsa.research.head_fusion.over_heads import AttentionOverHeads, concentration
from hsa.tree.positions import NodePositions
from tests.model_inputs import exact

WIDTH, HEADS, DIM = 13, 3, 5
TREE = Hierarchy.from_nested([[3, 2, 4], [1]])


def tokens(number=TREE.num_leaves, seed=5):
    return torch.randn(number, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def over_heads(penalty=0.5):
    return exact(AttentionOverHeads(HEADS, DIM, WIDTH, penalty=penalty)).train()


def layer(penalty=0.5):
    made = AttentionOverHeads(HEADS, DIM, WIDTH, penalty=penalty)
    return exact(EncoderLayer(WIDTH, HEADS, Hierarchical(), fusion=made, head_dim=DIM)).train()


def run(module, x):
    module(x, TREE, Groups((len(x),), None, None))


# Value


@given(st.integers(1, 7), st.integers(1, 11), st.floats(0, 30), st.integers(0, 999))
def test_the_penalty_lies_between_0_and_the_logarithm_of_the_heads(heads, number, sharpness, seed):
    generator = torch.Generator().manual_seed(seed)
    β = (torch.randn(number, heads, dtype=torch.float64, generator=generator) * sharpness).softmax(-1)
    result = concentration(β).item()
    assert -1e-12 <= result <= math.log(heads) + 1e-12
    used = β.mean(0)
    assert result == pytest.approx(math.log(heads) + (used * used.clamp(min=1e-300).log()).sum().item(), abs=1e-12)


def test_the_penalty_depends_on_the_mean_over_tokens():
    """Allow every token to use one head only, as long as different tokens use different heads."""
    everyone = torch.eye(HEADS, dtype=torch.float64)
    assert concentration(everyone).item() == pytest.approx(0, abs=1e-12)
    assert concentration(torch.full((4, HEADS), 1 / HEADS)).item() == pytest.approx(0, abs=1e-6)
    assert concentration(everyone[[1, 1, 1, 1]]).item() == pytest.approx(math.log(HEADS))
    two_of_three = everyone[[0, 0, 1, 1]]
    assert concentration(two_of_three).item() == pytest.approx(math.log(HEADS / 2))


def test_gradient_of_the_penalty():
    β = torch.rand(4, HEADS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(concentration, β)


def test_an_unused_head_can_come_back():
    """Check that at a weight of exactly 0, the gradient is finite and increases the weight."""
    β = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True)
    concentration(β).backward()
    assert β.grad.isfinite().all()
    assert (β.grad[0, 1:] < -10).all()
    logits = torch.tensor([[0.0, -200.0, -1.0]], requires_grad=True)
    concentration(logits.softmax(-1)).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 2] < 0 < logits.grad[0, 0]


# Collection


def test_penalties_are_collected_in_training_mode_and_inside_the_block_only():
    fusion, x = over_heads(), tokens()
    attended = torch.ones(len(x), HEADS, DIM, dtype=torch.float64)
    fusion.weigh(attended, x)  # outside of the block
    with collecting_penalties() as penalties:
        fusion.eval().weigh(attended, x)
        assert penalties == []
        fusion.train().weigh(attended, x)
        (result,) = penalties
        fusion.weigh(attended[:0], x[:0])  # no tokens, no penalty
    fusion.weigh(attended, x)
    assert penalties == [result]
    torch.testing.assert_close(result, 0.5 * concentration(fusion.weights(x)), rtol=0, atol=1e-12)
    assert result > 0.001


def test_no_penalty_of_weight_0():
    with collecting_penalties() as penalties:
        run(layer(penalty=0.0), tokens())
    assert penalties == []


def test_one_penalty_per_layer_with_its_own_weight():
    with collecting_penalties() as penalties:
        for penalty in (1.0, 3.0):
            run(layer(penalty), tokens())
    first, second = penalties
    torch.testing.assert_close(second, 3 * first)
    plain = EncoderLayer(WIDTH, HEADS, Hierarchical(), head_dim=DIM).double()
    with collecting_penalties() as penalties:
        run(plain, tokens())
    assert penalties == []


def test_bottom_up_has_one_penalty_per_height():
    with collecting_penalties() as penalties:
        bottom_up(tokens(), TREE, [layer()], [], None, NodePositions.of_sequences(TREE))
    assert len(penalties) == TREE.depth == 2


def test_the_innermost_block_collects():
    one, two, three = torch.arange(3.0).unbind()
    with collecting_penalties() as outer:
        add_penalty(one)
        with collecting_penalties() as inner:
            add_penalty(two)
        add_penalty(three)
    assert (outer, inner) == ([one, three], [two])
    with pytest.raises(ZeroDivisionError), collecting_penalties():
        raise ZeroDivisionError
    add_penalty(one)
    assert outer == [one, three]


# Effect


def optimised(penalty, wish=0.7, steps=150):
    """Return the mean β after training with a loss that rewards head 1, against nothing but the penalty."""
    torch.manual_seed(1)
    fusion, x = AttentionOverHeads(HEADS, DIM, WIDTH, penalty=penalty).double(), tokens(40)
    attended = torch.zeros(40, HEADS, 1, dtype=torch.float64)
    attended[:, 1] = 1  # only head 1 contributes to the loss
    optimizer = torch.optim.Adam(fusion.parameters(), lr=0.1)
    for _ in range(steps):
        with collecting_penalties() as penalties:
            loss = -wish * fusion.weigh(attended, x).sum(1).mean()
        optimizer.zero_grad()
        (loss + sum(penalties)).backward()
        optimizer.step()
    return fusion.weights(x).mean(0).detach()


def test_without_a_penalty_all_tokens_use_the_same_head():
    assert optimised(0.0)[1] > 0.99


@pytest.mark.parametrize("penalty", [0.5, 2.0, 20.0])
def test_the_penalty_keeps_heads_in_use_by_its_weight(penalty):
    """Expect b = softmax(wish / penalty at 1), which minimises −wish·b_1 + penalty·KL(b ‖ uniform)."""
    wanted = torch.tensor([0.0, 0.7 / penalty, 0.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(optimised(penalty), wanted, rtol=0, atol=2e-3)


def test_the_penalty_allows_tokens_to_use_different_heads():
    """Train two kinds of tokens, each with its own best head, and expect each to use that head."""
    torch.manual_seed(1)
    fusion = AttentionOverHeads(2, DIM, WIDTH, penalty=5.0).double()
    x = torch.cat([tokens(1, seed=1).expand(20, -1), tokens(1, seed=2).expand(20, -1)])
    attended = torch.eye(2, dtype=torch.float64).repeat_interleave(20, 0)[..., None]
    optimizer = torch.optim.Adam(fusion.parameters(), lr=0.05)
    for _ in range(100):
        with collecting_penalties() as penalties:
            loss = -fusion.weigh(attended, x).sum(1).mean()
        optimizer.zero_grad()
        (loss + sum(penalties)).backward()
        optimizer.step()
    β = fusion.weights(x)
    assert (β[:20, 0] > 0.95).all()
    assert (β[20:, 1] > 0.95).all()

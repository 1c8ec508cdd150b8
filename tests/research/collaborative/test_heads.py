"""Shared projections: exact with all channels, or with fewer if heads repeat each other, and approximate otherwise."""

import itertools

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.research.collaborative.heads import share_projections

HEADS, HEAD_DIM, WIDTH, TOKENS = 3, 5, 11, 7
CHANNELS = HEADS * HEAD_DIM


def random_layer(heads=HEADS, head_dim=HEAD_DIM, width=WIDTH, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads * head_dim, width), (heads * head_dim,), (heads * head_dim, width), (heads * head_dim,)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def head_logits(layer, heads, x):
    """Return the logits of each head, `[heads, tokens, tokens]`."""
    query_weight, query_bias, key_weight, key_bias = layer
    queries, keys = x @ query_weight.T + query_bias, x @ key_weight.T + key_bias
    queries, keys = (rows.unflatten(-1, (heads, -1)).transpose(0, 1) for rows in (queries, keys))
    return queries @ keys.mT


def shared_logits(shared, x):
    queries = x @ shared.query_weight.T + shared.query_bias
    keys = x @ shared.key_weight.T + shared.key_bias
    return torch.einsum("hr,ir,jr->hij", shared.mixing, queries, keys)


def forms(layer, heads):
    """Return the bilinear forms, `[heads, width + 1, width + 1]`, with biases as one more channel of the input."""
    query_weight, query_bias, key_weight, key_bias = layer
    queries = torch.cat([query_weight, query_bias[:, None]], 1).unflatten(0, (heads, -1))
    keys = torch.cat([key_weight, key_bias[:, None]], 1).unflatten(0, (heads, -1))
    return torch.einsum("hda,hdb->hab", queries, keys)


def random_inputs(count=200, seed=5, width=WIDTH):
    """Return inputs with a non-zero mean and different variances of their channels."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.05, 3, width, dtype=torch.float64)
    return torch.randn(count, width, dtype=torch.float64, generator=generator) * scale + 1.0


def moment_of(x):
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    return x.T @ x / len(x)


@pytest.mark.parametrize("with_moment", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_all_channels_keep_the_logits(dtype, tolerance, with_moment):
    layer = random_layer(dtype=dtype)
    x = random_inputs().to(dtype)
    shared = share_projections(*layer, HEADS, CHANNELS, moment=moment_of(x) if with_moment else None)
    assert shared.error < tolerance
    assert (shared.logit_error is not None) == with_moment
    expected = head_logits(layer, HEADS, x)
    assert (shared_logits(shared, x) - expected).norm() < tolerance * expected.norm()
    assert shared.query_weight.dtype == shared.mixing.dtype == dtype


def test_error_is_that_of_all_forms_together():
    layer = random_layer()
    shared = share_projections(*layer, HEADS, 7)
    parts = [shared.query_weight, shared.query_bias[:, None], shared.key_weight, shared.key_bias[:, None]]
    near = torch.einsum("hr,ra,rb->hab", shared.mixing, torch.cat(parts[:2], 1), torch.cat(parts[2:], 1))
    expected = forms(layer, HEADS)
    assert shared.error == pytest.approx(float((near - expected).norm() / expected.norm()), rel=1e-9)
    assert shared.shared_dim == 7
    assert shared.logit_error is None


def test_error_falls_with_the_channels():
    errors = [share_projections(*random_layer(), HEADS, n).error for n in range(1, CHANNELS + 1)]
    assert all(after < before for before, after in itertools.pairwise(errors))


def test_error_is_below_that_of_separate_heads():
    """Compare with the strongest singular components over all heads, the best approximation without sharing."""
    layer = random_layer()
    strengths = torch.linalg.svdvals(forms(layer, HEADS))[:, :HEAD_DIM].flatten().sort(descending=True).values
    for channels in (3, 7, 11):
        cut = float(strengths[channels:].norm() / strengths.norm())
        assert share_projections(*layer, HEADS, channels).error < cut


@pytest.mark.parametrize("amount", [1.0, -0.4])
def test_repeated_heads_need_no_channels(amount):
    """Half the channels are exact if three of six heads are multiples of the others."""
    query_weight, query_bias, key_weight, key_bias = random_layer()
    doubled = [
        torch.cat([query_weight, amount * query_weight]),
        torch.cat([query_bias, amount * query_bias]),
        torch.cat([key_weight, key_weight]),
        torch.cat([key_bias, key_bias]),
    ]
    shared = share_projections(*doubled, 2 * HEADS, CHANNELS)
    assert shared.error < 1e-7
    x = random_inputs()
    expected = head_logits(doubled, 2 * HEADS, x)
    assert (shared_logits(shared, x) - expected).norm() < 1e-6 * expected.norm()
    assert share_projections(*doubled, 2 * HEADS, CHANNELS - 1).error > 1e-3


def test_rotated_channels_of_a_repeated_head_do_not_matter():
    """The bilinear form of a head does not change with q → R q and k → R k for orthogonal R."""
    query_weight, query_bias, key_weight, key_bias = random_layer(heads=1)
    turn = torch.linalg.qr(random_layer(heads=1, width=HEAD_DIM, seed=3)[0])[0]
    doubled = [torch.cat([x, turn @ x]) for x in (query_weight, query_bias, key_weight, key_bias)]
    assert share_projections(*doubled, 2, HEAD_DIM, iterations=0).error < 1e-7


def test_moment_improves_the_logits():
    layer, x = random_layer(), random_inputs()
    y = random_inputs(seed=6)
    expected = head_logits(layer, HEADS, y)
    expected = expected - expected.mean(-1, keepdim=True)
    errors = []
    for moment in (None, moment_of(x)):
        shared = share_projections(*layer, HEADS, 7, moment=moment)
        logits = shared_logits(shared, y)
        errors.append(float((logits - logits.mean(-1, keepdim=True) - expected).norm() / expected.norm()))
    assert errors[1] < 0.6 * errors[0]


def test_logit_error_is_that_of_logits_between_independent_inputs():
    layer, x = random_layer(), random_inputs()
    shared = share_projections(*layer, HEADS, 4, moment=moment_of(x))
    expected, logits = head_logits(layer, HEADS, x), shared_logits(shared, x)
    expected, logits = (z - z.mean(-1, keepdim=True) for z in (expected, logits))
    assert shared.logit_error == pytest.approx(float((logits - expected).norm() / expected.norm()), rel=1e-2)


def test_part_that_softmax_drops_costs_no_channels():
    """A key bias adds the same number to all logits of a query."""
    layer, moment = random_layer(), moment_of(random_inputs())
    without = share_projections(*layer[:3], None, HEADS, 7, moment=moment)
    large = share_projections(*layer[:3], 100 * layer[3], HEADS, 7, moment=moment)
    assert large.logit_error == pytest.approx(without.logit_error, rel=1e-3)


def test_parameters_are_counted():
    shared = share_projections(*random_layer(), HEADS, 7)
    assert shared.parameters_before == 2 * CHANNELS * (WIDTH + 1)
    assert shared.parameters_after == 2 * 7 * (WIDTH + 1) + HEADS * 7
    tensors = shared.query_weight, shared.query_bias, shared.key_weight, shared.key_bias, shared.mixing
    assert sum(x.numel() for x in tensors) == shared.parameters_after


@pytest.mark.parametrize("channels", [7, CHANNELS])
def test_projections_are_balanced(channels):
    """Queries and keys have equal norms, which suits training and float16."""
    shared = share_projections(*random_layer(), HEADS, channels, moment=moment_of(random_inputs()))
    torch.testing.assert_close(shared.mixing.abs().amax(0), torch.ones(channels, dtype=torch.float64))
    lengths = [
        torch.cat([weight, bias[:, None]], 1).norm(dim=1)
        for weight, bias in ((shared.query_weight, shared.query_bias), (shared.key_weight, shared.key_bias))
    ]
    torch.testing.assert_close(*lengths)


def test_without_biases():
    query_weight, _, key_weight, _ = random_layer()
    zero = torch.zeros(CHANNELS, dtype=torch.float64)
    zeros = share_projections(query_weight, zero, key_weight, zero, HEADS, 7)
    missing = share_projections(query_weight, None, key_weight, None, HEADS, 7)
    assert missing.error == zeros.error
    assert missing.parameters_before == 2 * CHANNELS * WIDTH
    assert float(missing.query_bias.abs().max()) < 1e-12


def test_heads_with_more_channels_than_the_width():
    layer = random_layer(heads=2, head_dim=13, width=5)
    assert share_projections(*layer, 2, 12).error < 1e-10
    assert share_projections(*layer, 2, 25).error < 1e-10
    assert 0 < share_projections(*layer, 2, 4).error < 1
    assert share_projections(*random_layer(heads=5, head_dim=3, width=2), 5, 11).error < 1e-10


def test_zero_weights():
    shared = share_projections(
        *(torch.zeros_like(x) for x in random_layer()), HEADS, 4, moment=moment_of(random_inputs())
    )
    assert shared.error == shared.logit_error == 0.0
    assert not shared.query_weight.any()


def test_equal_inputs_give_finite_weights():
    alike = torch.ones(9, WIDTH, dtype=torch.float64)
    shared = share_projections(*random_layer(), HEADS, 4, moment=moment_of(alike))
    assert bool(shared.query_weight.isfinite().all())
    assert bool(shared.key_bias.isfinite().all())


@pytest.mark.parametrize("shared_dim", [0, CHANNELS + 1, 3.0, True])
def test_shared_dim_out_of_range(shared_dim):
    with pytest.raises(InvalidInput, match=rf"shared_dim: expected 1 to {CHANNELS} \(.*\), got {shared_dim}"):
        share_projections(*random_layer(), HEADS, shared_dim)


def test_mismatched_shapes():
    layer = random_layer()
    with pytest.raises(InvalidInput, match=r"heads: expected .*, got 4"):
        share_projections(*layer, 4, 3)
    with pytest.raises(InvalidInput, match=r"heads: expected .*, got 0"):
        share_projections(*layer, 0, 3)
    with pytest.raises(InvalidInput, match=r"weights: expected .*, got \[15, 11\] and \[14, 11\]"):
        share_projections(layer[0], layer[1], layer[2][:-1], layer[3], HEADS, 3)
    with pytest.raises(InvalidInput, match="key_bias"):
        share_projections(*layer[:3], layer[3][:-1], HEADS, 3)
    with pytest.raises(InvalidInput, match="query_bias"):
        share_projections(layer[0], layer[1][:-1], *layer[2:], HEADS, 3)
    x = random_inputs()
    with pytest.raises(InvalidInput, match=r"moment: expected .* \[12, 12\], .*, got shape \[11, 11\]$"):
        share_projections(*layer, HEADS, 3, moment=x.T @ x)
    with pytest.raises(InvalidInput, match=r"moment: expected finite .*, got shape \[12, 12\] with infinite or NaN"):
        share_projections(*layer, HEADS, 3, moment=moment_of(x) * torch.nan)
    with pytest.raises(InvalidInput, match=r"moment\[-1, -1\]: expected 1, got 2"):
        share_projections(*layer, HEADS, 3, moment=2 * moment_of(x))

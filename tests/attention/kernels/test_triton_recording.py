"""Repeated calls of operators: recorded launches give the results of a checked call, for other tensors."""

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings

from hsa import Hierarchy, checking, clustered_attention, hierarchical_attention
from hsa.attention.clustered import operator as clustered
from hsa.attention.hierarchical import operator
from hsa.attention.kernels.triton.recording import Recording, empty
from hsa.errors import HsaError, InvalidInput, NonFinite
from tests.forests import forests
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

TREE = Hierarchy.from_nested([[[3, 2], [4]], [[5], [1, 2]]])


def rows(tree, seed, heads=2, dim=16, number=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tree.num_leaves, heads, dim, generator=generator).to(DEVICE) for _ in range(number)]


def attend(tree, tensors, backend="triton", **options):
    """Return the output, and the gradients of the tensors that need one."""
    out = hierarchical_attention(*tensors, tree, backend=backend, **options)
    leaves = [x for x in dict.fromkeys(tensors) if x.requires_grad]
    return [out.detach(), *(torch.autograd.grad(out.square().sum(), leaves) if leaves else ())]


def close(ours, wanted):
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def unchecked(monkeypatch):
    """Fail if a call is checked."""

    def fail(*_, **__):
        raise AssertionError("the call was not repeated")

    return lambda: monkeypatch.setattr(operator, "check_inputs", fail)


@settings(max_examples=10)
@given(forests())
def test_repeated_calls_agree_with_torch(tree):
    tree = tree.to(DEVICE)
    for seed in range(3):
        for needs_gradient in (False, True):
            tensors = [x.requires_grad_(needs_gradient) for x in rows(tree, seed)]
            for include_self in (False, True):
                options = {"include_self": include_self}
                close(attend(tree, tensors, **options), attend(tree, tensors, "torch", **options))


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_calls_are_repeated_without_checks(needs_gradient, unchecked):
    tree = TREE.to(DEVICE)
    attend(tree, [x.requires_grad_(needs_gradient) for x in rows(tree, 0)])
    wanted = attend(tree, [x.requires_grad_(needs_gradient) for x in rows(tree, 1)], "torch")
    unchecked()
    close(attend(tree, [x.requires_grad_(needs_gradient) for x in rows(tree, 1)]), wanted)


def test_another_layout_is_another_call():
    """The layouts of tensors, tensors that are the same, and options do not mix."""
    tree = TREE.to(DEVICE)
    for seed in range(2):
        q, k, v = rows(tree, seed)
        packed = torch.stack([q, k, v], 1)
        ways = [(q, k, v), (q, q, v), (q, q, q), (q, k, k), packed.unbind(1), (packed[:, 0], k, v)]
        ways += [tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))]
        ways += [tuple(torch.cat([x[:, :, :1], x], 2)[:, :, 1:] for x in (q, k, v))]  # not at multiples of 16 bytes
        for tensors in ways:
            for scale in (None, 0.7):
                close(attend(tree, tensors, scale=scale), attend(tree, tensors, "torch", scale=scale))


def test_gradients_of_another_layout():
    tree = TREE.to(DEVICE)
    for seed in range(2):
        leaves = [x.requires_grad_() for x in rows(tree, seed)]
        plain = torch.randn(tree.num_leaves, 2, 16, device=DEVICE)
        for along in (plain, plain.transpose(0, 1).contiguous().transpose(0, 1), plain[..., :1].expand_as(plain)):
            found = [
                torch.autograd.grad(hierarchical_attention(*leaves, tree, backend=b), leaves, along)
                for b in ("triton", "torch")
            ]
            close(*found)


def test_checks_and_refusals_remain():
    tree = TREE.to(DEVICE)
    q, k, v = rows(tree, 0)
    attend(tree, (q, k, v))
    with pytest.raises(InvalidInput, match="rows"):
        attend(tree, (q[:-1], k[:-1], v[:-1]))
    broken = q.clone()
    broken[3] = torch.nan
    with checking(), pytest.raises(NonFinite, match="q: leaf 3"):
        attend(tree, (broken, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend(tree, leaves)
    out = hierarchical_attention(*leaves, tree, backend="triton")
    with pytest.raises(HsaError, match="create_graph=True"):
        torch.autograd.grad(out.sum(), leaves, create_graph=True)
    with pytest.raises(HsaError, match=r"outside torch\.func transforms"):
        torch.func.grad(lambda x: hierarchical_attention(x, k, v, tree, backend="triton").sum())(q)


def test_clustered_calls_are_repeated(monkeypatch):
    """Other lengths, rules and tensors are other calls; the same ones are not checked again."""
    calls = [{"causal": True}, {"causal": True, "threshold": 0.2}, {"causal": False}, {"lengths": [300, 220]}]
    calls += [{"causal": True, "threshold": torch.tensor([0.2, 0.05])}]
    calls += [{"causal": True, "top_k": 2}, {"causal": True, "windows": True}, {"query_lengths": [520], "tile": 32}]
    tensors = [[torch.randn(520, 2, 16, generator=torch.Generator().manual_seed(s)) for _ in "qkv"] for s in range(2)]
    tensors = [[x.to(DEVICE) for x in three] for three in tensors]
    wanted = [[clustered_attention(*three, backend="torch", **options) for options in calls] for three in tensors]
    for turn in range(3):
        if turn:  # everything was recorded
            monkeypatch.setattr(clustered, "layout_of", None)
        for three, results in zip(tensors, wanted, strict=True):
            for options, expected in zip(calls, results, strict=True):
                out, lse = clustered_attention(*three, backend="triton", return_lse=True, **options)
                torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
                assert lse.shape == (520, 2)


@pytest.mark.parametrize("option", [{"causal": 1}, {"threshold": True}, {"threshold": (1, True)}, {"lengths": [520.5]}])
def test_equal_options_of_another_type_are_refused(option):
    q = torch.randn(520, 2, 16, device=DEVICE)
    clustered_attention(q, q, q, [520], causal=True, threshold=1, backend="triton")
    with pytest.raises(InvalidInput, match=next(iter(option))):
        clustered_attention(
            q, q, q, **{"lengths": [520], "causal": True, "threshold": 1, "backend": "triton", **option}
        )


def test_number_of_kept_calls_is_limited():
    tree = TREE.to(DEVICE)
    for number in range(40):
        attend(tree, rows(tree, 0), scale=0.1 * (number + 1))
    assert len(tree.peek("repeated calls")) == 16


def test_recordings_know_every_tensor():
    """A launch with a tensor from elsewhere cannot be repeated."""
    from hsa.attention.kernels.triton.recording import Launch

    x, y = torch.zeros(4), torch.zeros(4)
    with Recording(x) as recording:
        z = empty(x, 3)
    recording.launches = [Launch(None, 1, (x, z, 5), None, {})]
    assert recording.replay([z]).bytes == 0
    recording.launches = [Launch(None, 1, (x, y), None, {})]
    with pytest.raises(AssertionError, match="argument 1"):
        recording.replay([z])

"""Attention without a gradient: what is skipped changes nothing, and is skipped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Entmax, Hierarchy, hierarchical_attention, multiscale_attention
from hsa.attention.hierarchical.entmax import pruned
from hsa.attention.hierarchical.entmax.sweeps import handed_down
from hsa.attention.rounds import rooted, rounds
from tests.forests import forests, random_inputs, random_positions

HEADS = 3
ALPHAS = (2.0, 1.5, 1.2, torch.tensor([[1.9, 1.4, 2.0], [1.6, 2.0, 1.2]]), torch.tensor([[1.7], [1.3], [2.0]]))


def sharp(forest, seed, strength):
    """Leaves of a subtree are alike, the more so the stronger: then much is left out above them."""
    q, k, v = random_inputs(forest, seed, heads=HEADS, kv_heads=HEADS)
    generator = torch.Generator().manual_seed(seed)
    s = forest.structure
    for node in range(forest.num_nodes):
        leaves = slice(s.first_leaf[node], s.end_leaf[node])
        for x in (q, k):
            x[leaves] += strength * torch.randn(1, *x.shape[1:], generator=generator, dtype=torch.float64)
    return q, k, v


@pytest.mark.parametrize("most", [0.0, 0.75, 2.0])  # all rows of a part where one is needed; the usual; only those
@settings(max_examples=25)
@given(
    forests(),
    st.integers(0, 99),
    st.sampled_from([1.0, 5.0]),
    st.sampled_from(ALPHAS),
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.sampled_from(["weighted", "logits"]),
    st.booleans(),
)
def test_skipping_changes_nothing(most, forest, seed, strength, alpha, how, counts, with_positions):
    q, k, v = sharp(forest, seed, strength)
    positions = random_positions(forest, seed, HEADS) if with_positions else None
    options = {"positions": positions, "include_self": how[0], "causal": how[1], "backend": "torch"}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(pruned, "MOST", most)
        patch.setattr("hsa.attention.hierarchical.entmax.family.CHUNK", 64)  # several parts
        found = hierarchical_attention(q, k, v, forest, normalizer=Entmax(alpha, counts), **options)
    whole = hierarchical_attention(q, k, v.requires_grad_(), forest, normalizer=Entmax(alpha, counts), **options)
    torch.testing.assert_close(found, whole.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nor_in_lower_precision(dtype):
    forest = Hierarchy.regular([300], (5, 4, 3))
    q, k, v = (x.to(dtype) for x in sharp(forest, 7, 0.7))
    for alpha in ALPHAS:
        with torch.no_grad():
            found = hierarchical_attention(q, k, v, forest, normalizer=Entmax(alpha), backend="torch")
        whole = hierarchical_attention(q, k, v.requires_grad_(), forest, normalizer=Entmax(alpha), backend="torch")
        assert found.dtype == dtype
        torch.testing.assert_close(found, whole.detach(), rtol=0, atol=1e-4 if dtype == torch.float32 else 0.06)


def is_needed(q, k, forest, entmax, **options):
    """`[nodes, heads]`: families whose rows have to be known."""
    forest, positions = rooted(forest, options.pop("positions", None))
    plan = rounds(forest)
    order = positions, options.get("include_self", False), options.get("causal", False), entmax, q.shape[-1] ** -0.5
    sweep = pruned.compare(q, k, k[..., :0], forest, plan, *order)
    found = torch.zeros(forest.num_nodes, q.shape[1], dtype=torch.bool)
    for r, needed in enumerate(pruned.needed(sweep)):
        found[plan.node_of_slot[plan.slot_bounds[r] : plan.slot_bounds[r + 1]]] = needed
    return found


@settings(max_examples=50)
@given(forests(), st.integers(0, 99), st.sampled_from(ALPHAS), st.booleans(), st.sampled_from(["weighted", "logits"]))
def test_whatever_gets_a_weight_is_solved(forest, seed, alpha, include_self, counts):
    q, k, _ = sharp(forest, seed, 3.0)
    options = {"include_self": include_self}
    needed = is_needed(q, k, forest, Entmax(alpha, counts), **options)
    weight = handed_down(q, k, rooted(forest)[0], normalizer=Entmax(alpha, counts), **options)
    assert not bool(((weight > 1e-9) & ~needed).any())


def blocks(strength, other=(1, 0, 3, 2)):
    """Four blocks of leaves in sentences, each with keys like the queries of another."""
    forest = Hierarchy.from_nested([[[3, 5], [2, 2, 4], [7], [1, 6]]])
    s = forest.structure
    members = s.leaf_count[s.parent == 0]
    code = torch.eye(4, dtype=torch.float64) * strength
    leaves = torch.repeat_interleave(torch.arange(4), torch.as_tensor(members))
    _, _, v = random_inputs(forest, 1, heads=HEADS, kv_heads=HEADS)
    q, k = (code[of][leaves][:, None].expand(-1, HEADS, -1) for of in (torch.arange(4), torch.tensor(other)))
    return q, k, v, forest


def test_blocks_that_look_elsewhere_are_not_solved(monkeypatch):
    """Nothing below the root is; with equal logits all is, but for the sentence of one word, in which there is nothing."""
    solved = []

    def count(logits, alpha, entries, solve=pruned.solve_rows):
        solved.append(logits.shape[:-2].numel())
        return solve(logits, alpha, entries)

    monkeypatch.setattr(pruned, "solve_rows", count)
    for strength, rows in ((9.0, HEADS), (0.0, 12 * HEADS)):  # a root, four blocks, eight sentences
        q, k, v, forest = blocks(strength)
        solved.clear()
        with torch.no_grad():
            hierarchical_attention(q, k, v, forest, normalizer=Entmax(1.5), backend="torch")
        assert sum(solved) == rows + (HEADS if strength == 0 else 0)  # that sentence is in a part with others
        needed = is_needed(q, k, forest, Entmax(1.5))
        assert int(needed.sum()) == rows


def test_many_equal_keys_are_worth_more_than_their_logits():
    """With counts in the logits: nine keys with logits of 0 reach 0.86 together; 2.1 beside them leave something for it."""
    forest = Hierarchy.from_parents([-1, 0, 0, *[1] * 9])  # nine leaves, and one beside them
    q, k = torch.zeros(2, 10, 1, 2, dtype=torch.float64).unbind(0)
    alone = int(forest.structure.first_leaf[2])
    q[:, 0, 0], k[alone, 0, 0] = 2.1, 1.0
    v = torch.randn(10, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"normalizer": Entmax(1.5, "logits"), "scale": 1.0, "backend": "torch"}
    weight = handed_down(q, k, forest, normalizer=Entmax(1.5, "logits"), scale=1.0)
    assert 0.05 < weight[1] < 0.2
    with torch.no_grad():
        found = hierarchical_attention(q, k, v, forest, **options)
    whole = hierarchical_attention(q, k, v.requires_grad_(), forest, **options)
    torch.testing.assert_close(found, whole.detach(), rtol=0, atol=1e-12)


def test_blocks_that_look_inside_are_solved():
    q, k, _, forest = blocks(9.0, other=(0, 1, 2, 3))
    needed = is_needed(q, k, forest, Entmax(1.5))
    assert int(needed.sum()) == 12 * HEADS


@pytest.mark.filterwarnings("ignore")  # the compiler looks at .grad where there is none
@pytest.mark.parametrize(
    "operator", [hierarchical_attention, pytest.param(multiscale_attention, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("alpha", [1.5, torch.tensor([[1.9, 1.4, 2.0], [1.6, 2.0, 1.2]])])
def test_a_compiler_is_no_obstacle(operator, alpha):
    q, k, v, forest = blocks(1.0)

    def attend(q, k, v):
        return operator(q, k, v, forest, normalizer=Entmax(alpha))

    compiled = torch.compile(attend, backend="eager")
    for needs_grad in (False, True):
        inputs = [x.clone().requires_grad_(needs_grad) for x in (q, k, v)]
        torch.testing.assert_close(compiled(*inputs), attend(*inputs), rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, attend)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)

"""Attention flow compared with its definition, one example at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.research.bidaf import AttentionFlow

WIDTH = 5
lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=4)


def layer(dtype=torch.float64) -> AttentionFlow:
    flow = AttentionFlow(WIDTH).to(dtype)
    with torch.no_grad():
        for part in flow.parameters():
            part.normal_()
    return flow


def inputs(sizes, requires_grad=False):
    """Return vectors and forests of contexts and questions."""
    forests = [Hierarchy.flat([pair[side] for pair in sizes]) for side in (0, 1)]
    vectors = [torch.randn(f.num_leaves, WIDTH, dtype=torch.float64, requires_grad=requires_grad) for f in forests]
    return *vectors, *forests


def definition(flow, h, u):
    """Compute the formula of the paper, token by token."""
    w = torch.cat([flow.of_context, flow.of_question, flow.of_both])
    similarity = torch.stack([torch.stack([w @ torch.cat([a, b, a * b]) for b in u]) for a in h])
    to_question = similarity.softmax(1)
    to_context = similarity.max(1).values.softmax(0)
    attended = sum(to_context[t] * h[t] for t in range(len(h)))
    rows = []
    for t in range(len(h)):
        asked = sum(to_question[t, j] * u[j] for j in range(len(u)))
        rows.append(torch.cat([h[t], asked, h[t] * asked, h[t] * attended]))
    return torch.stack(rows)


@settings(max_examples=20)
@given(sizes=lengths)
def test_matches_the_definition(sizes):
    flow = layer()
    h, u, contexts, questions = inputs(sizes, requires_grad=True)
    out = flow(h, u, contexts, questions)
    examples = zip(h.split(contexts.lengths), u.split(questions.lengths), strict=True)
    expected = torch.cat([definition(flow, *example) for example in examples])
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    parameters = [h, u, *flow.parameters()]
    weight = torch.randn_like(out)
    for ours, theirs in zip(
        *(torch.autograd.grad(x, parameters, weight, allow_unused=True) for x in (out, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@settings(max_examples=15)
@given(sizes=lengths)
def test_an_example_does_not_depend_on_its_batch(sizes):
    flow = layer()
    h, u, contexts, questions = inputs(sizes)
    out = flow(h, u, contexts, questions).split(contexts.lengths)
    examples = zip(h.split(contexts.lengths), u.split(questions.lengths), strict=True)
    for t, (context, question) in enumerate(examples):
        alone = flow(context, question, Hierarchy.flat([len(context)]), Hierarchy.flat([len(question)]))
        torch.testing.assert_close(out[t], alone, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    flow = layer()
    h, u, contexts, questions = inputs([(3, 2), (1, 4)], requires_grad=True)

    def run(h, u, *parameters):
        named = dict(zip(dict(flow.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(flow, named, (h, u, contexts, questions))

    assert torch.autograd.gradcheck(run, (h, u, *flow.parameters()))


def test_single_token_and_no_examples():
    flow = layer()
    h, u, *forests = inputs([(1, 1)], requires_grad=True)
    torch.testing.assert_close(flow(h, u, *forests), torch.cat([h, u, h * u, h * h], 1))
    empty, _, *forests = inputs([], requires_grad=True)
    out = flow(empty, empty, *forests)
    assert out.shape == (0, 4 * WIDTH)
    for grad in torch.autograd.grad(out.sum(), [empty, *flow.parameters()], allow_unused=True, materialize_grads=True):
        assert grad.isfinite().all()


def test_trees_do_not_matter():
    flow = layer()
    h, u, contexts, questions = inputs([(6, 4), (3, 2)])
    nested = Hierarchy.from_nested([[2, [3, 1]], 3])
    assert torch.equal(flow(h, u, nested, questions), flow(h, u, contexts, questions))


def test_half_precision_stays_close():
    flow = layer()
    h, u, *forests = inputs([(6, 4), (3, 2)])
    expected = flow(h, u, *forests)
    half = layer(torch.bfloat16)
    half.load_state_dict(flow.state_dict())
    out = half(h.bfloat16(), u.bfloat16(), *forests)
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).abs().max() <= 0.05 * expected.abs().max()


def test_initialised_like_a_linear_layer():
    parts = torch.cat(list(AttentionFlow(1000).parameters()))
    assert parts.shape == (3000,)
    assert 0.9 * 3000**-0.5 < parts.abs().max() <= 3000**-0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": torch.zeros(8, WIDTH)}, r"context: expected \[9 leaves, 5\], got shape \(8, 5\)"),
        ({"context": torch.zeros(9, WIDTH + 1)}, r"context: expected .*, got shape \(9, 6\)"),
        ({"question": torch.zeros(6, 1, WIDTH)}, "question: expected .*, got shape"),
        ({"question": None}, "question: expected .*, got NoneType"),
        ({"contexts": [6, 3]}, "contexts: expected .*, got list"),
        ({"questions": Hierarchy.flat([3, 2, 1])}, "questions: expected 2, one per context, got 3 trees"),
    ],
)
def test_bad_input(change, message):
    names = ("context", "question", "contexts", "questions")
    arguments = dict(zip(names, inputs([(6, 4), (3, 2)]), strict=True)) | change
    with pytest.raises(InvalidInput, match=message):
        layer()(**arguments)
    with pytest.raises(InvalidInput, match="width"):
        AttentionFlow(0)

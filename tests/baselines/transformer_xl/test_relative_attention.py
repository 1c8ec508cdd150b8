"""Relative attention compared with its definition, token by token, over texts read in several passes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.baselines.transformer_xl import segments as memory_segments
from hsa.baselines.transformer_xl.relative_attention import DistanceFeatures, RelativeAttention, relative_shift
from hsa.baselines.transformer_xl.segments import plan_segments, plan_step
from hsa.nn import buckets
from hsa.nn.attention import counting_operations
from tests.model_inputs import exact

WIDTH, HEADS = 14, 2


def attention():
    return exact(RelativeAttention(WIDTH, HEADS))


def features(distance, width=WIDTH):
    """Return sin and cos of a distance, written out."""
    waves = math.ceil(width / 2)
    phases = [distance / 10_000 ** (i / waves) for i in range(waves)]
    return [math.sin(p) for p in phases] + [math.cos(p) for p in phases][: width - waves]


def by_definition(module, x, before, lengths, segment, memory, carried, begun):
    """Return the output of every token, one by one, without gradients into earlier segments."""
    out, done, rows = [], 0, 0
    for size, had, old in zip(lengths, carried, begun, strict=True):
        own = x[done : done + size]
        text = torch.cat([before[rows : rows + had], own])  # carried tokens, then new ones
        done, rows = done + size, rows + had
        for i in range(had, had + size):
            segment_start = i - (i - had + old) % segment
            first, live = max(0, segment_start - memory), max(segment_start, had)
            known = torch.cat([text[first:live].detach(), text[live : i + 1]])
            out.append(_row(module, text[i], known))
    return torch.stack(out)


def _row(module, query, known):
    q = module.query(query).view(HEADS, -1)
    k, v = (t.view(len(known), HEADS, -1) for t in module.key_value(known).chunk(2, -1))
    table = torch.tensor([features(len(known) - 1 - j) for j in range(len(known))], dtype=known.dtype)
    r = module.distance(table).view(len(known), HEADS, -1)
    u, w = module.u.view(HEADS, -1), module.w.view(HEADS, -1)
    logits = torch.einsum("hd,jhd->hj", q + u, k) + torch.einsum("hd,jhd->hj", q + w, r)
    weights = (logits / math.sqrt(WIDTH // HEADS)).softmax(-1)
    return module.output(torch.einsum("hj,jhd->hd", weights, v).flatten())


@st.composite
def readings(draw):
    """Draw texts with carried tokens, which may include those of an unfinished segment."""
    segment, memory = draw(st.integers(1, 7)), draw(st.integers(0, 9))
    texts = draw(st.integers(1, 4))
    lengths = [draw(st.integers(1, 19)) for _ in range(texts)]
    begun = [draw(st.integers(0, segment - 1)) for _ in range(texts)]
    carried = [old + draw(st.integers(0, memory)) for old in begun]
    return lengths, segment, memory, carried, begun


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 5), (3, 3), (5, 11)])
def test_relative_shift_equals_a_loop(rows, keys):
    x = torch.randn(2, 3, rows, keys + 1)
    shifted = relative_shift(x)
    assert shifted.shape == (2, 3, rows, keys)
    for i in range(rows):
        for j in range(keys - rows + i + 1):
            distance = i + keys - rows - j
            assert torch.equal(shifted[..., i, j], x[..., i, keys - 1 - distance])
    assert shifted.data_ptr() == x[0, 0].flatten()[rows - 1 :].data_ptr()


@given(readings())
def test_attention_matches_its_definition(reading):
    lengths, segment, memory, carried, begun = reading
    module, x, before = attention(), torch.randn(sum(lengths), WIDTH), torch.randn(sum(carried), WIDTH)
    x, before = x.double().requires_grad_(), before.double().requires_grad_()
    plan = plan_segments(lengths, segment, memory, carried=carried, begun=begun)
    result, rows = module(x, before, plan)
    wanted = by_definition(module, x, before.detach(), lengths, segment, memory, carried, begun)
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-10)
    assert torch.equal(rows, torch.cat([before, x]))
    assert not rows.requires_grad
    leaves = [x, *module.parameters()]
    slope = torch.randn_like(result)
    torch.testing.assert_close(
        torch.autograd.grad(result, leaves, slope), torch.autograd.grad(wanted, leaves, slope), rtol=0, atol=1e-9
    )
    assert torch.autograd.grad(module(x, before, plan)[0], before, slope, allow_unused=True) == (None,)
    with torch.no_grad():
        torch.testing.assert_close(module(x, before, plan)[0], wanted, rtol=0, atol=1e-10)
        keys, carried_on = module(x, module.key_value(before), plan, projected=True)
        torch.testing.assert_close(keys, wanted, rtol=0, atol=1e-10)
        torch.testing.assert_close(carried_on, module.key_value(rows), rtol=0, atol=1e-10)


@given(readings())
def test_kept_rows(reading):
    """Keep the memory before the unfinished segment and the tokens of that segment, text by text."""
    lengths, segment, memory, carried, begun = reading
    plan = plan_segments(lengths, segment, memory, carried=carried, begun=begun)
    rows, new, wanted = 0, sum(carried), []
    for size, had, old, kept in zip(lengths, carried, begun, plan.kept, strict=True):
        text = [*range(rows, rows + had), *range(new, new + size)]
        rows, new = rows + had, new + size
        assert kept == min(len(text), memory + (old + size) % segment)
        wanted += text[len(text) - kept :]
    assert plan.keep.tolist() == wanted


@given(readings())
def test_operations_are_counted_pair_by_pair(reading):
    lengths, segment, memory, carried, begun = reading
    pairs = 0
    for size, had, old in zip(lengths, carried, begun, strict=True):
        for i in range(had, had + size):
            segment_start = i - (i - had + old) % segment
            pairs += i + 1 - max(0, segment_start - memory)
    plan = plan_segments(lengths, segment, memory, carried=carried, begun=begun)
    assert plan.entries == pairs
    x, before = torch.randn(sum(lengths), WIDTH), torch.randn(sum(carried), WIDTH)
    with counting_operations() as counts:
        attention()(x.double(), before.double(), plan)
    # Products and sums of contents, distances and values, and an exponential per head.
    assert [count.total for count in counts] == [pairs * (3 * 2 * WIDTH + HEADS)]


def test_many_segments_share_calls_and_large_calls_are_split(monkeypatch):
    lengths = [200, 3, 131, 70, 1, 64]
    module, x = attention(), torch.randn(sum(lengths), WIDTH).double()
    plan = plan_segments(lengths, 32, 40)
    assert len(plan.buckets) < 5
    monkeypatch.setattr(memory_segments, "_AT_ONCE", 5000)
    split = plan_segments(lengths, 32, 40)
    assert all(b.length * (b.length + b.memory) * b.segments <= 5000 for b in split.buckets)
    assert len(split.buckets) > len(plan.buckets)
    monkeypatch.setattr(buckets, "_FEW", 1000)
    alone = plan_segments(lengths, 32, 40)
    assert all(torch.equal(b.queries.unique(), b.queries.sort()[0]) for b in alone.buckets)  # no padding
    wanted = module(x, None, alone)[0]
    for other in (plan, split):
        torch.testing.assert_close(module(x, None, other)[0], wanted, rtol=0, atol=1e-10)


@given(st.integers(1, 11), st.integers(1, 7), st.integers(0, 9), st.data())
def test_plan_step_equals_a_pass_of_one_token(texts, segment, memory, data):
    """Compare the plans for texts at the same position."""
    seen = data.draw(st.integers(0, 25))
    begun = seen % segment
    carried = min(seen, memory + begun)
    step = plan_step(texts, segment, memory, carried=carried, begun=begun)
    wanted = plan_segments([1] * texts, segment, memory, carried=[carried] * texts, begun=[begun] * texts)
    for name in ("longest", "entries", "recalls", "kept"):
        assert getattr(step, name) == getattr(wanted, name)
    assert torch.equal(step.back, wanted.back)
    assert torch.equal(step.keep, wanted.keep)
    (bucket,), (other,) = step.buckets, wanted.buckets
    assert (bucket.segments, bucket.length, bucket.memory) == (other.segments, other.length, other.memory)
    for name in ("queries", "remembered", "mask"):
        assert torch.equal(getattr(bucket, name), getattr(other, name))


@pytest.mark.parametrize("width", [1, 7, 12])
def test_features_of_any_distance(width):
    made, cpu = DistanceFeatures(width), torch.device("cpu")
    for count in (3, 50_000, 2):
        result = made(count, cpu, torch.float64)
        assert result.shape == (count + 1, width)
        for distance in {0, 1, count - 1}:
            wanted = torch.tensor(features(distance, width), dtype=torch.float64)
            torch.testing.assert_close(result[count - 1 - distance], wanted, rtol=0, atol=1e-10)
    assert made(3, cpu, torch.bfloat16).dtype == torch.bfloat16


def test_few_queries_fold_the_projection():
    """One token does not project all distances, and gets the same numbers."""
    module, before = attention(), torch.randn(301, WIDTH).double()
    x = torch.randn(40, WIDTH).double()
    calls = []
    module.distance.register_forward_hook(lambda *_: calls.append(1))
    whole = module(x, before, plan_segments([40], 1000, 0, carried=[301], begun=[301]))[0]
    assert calls == [1]
    step = module(x[:1], before, plan_segments([1], 1000, 0, carried=[301], begun=[301]))[0]
    assert calls == [1]
    torch.testing.assert_close(step, whole[:1], rtol=0, atol=1e-10)


def test_half_precision_stays_close():
    module, x = attention().float(), torch.randn(37, WIDTH)
    plan = plan_segments([20, 17], 5, 7)
    wanted = module(x, None, plan)[0]
    with torch.autocast("cpu", torch.bfloat16):
        result, _ = module(x, None, plan)
    assert result.dtype == torch.bfloat16
    assert (result - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_no_tokens():
    plan = plan_segments([], 5, 7)
    assert attention()(torch.empty(0, WIDTH).double(), None, plan)[0].shape == (0, WIDTH)

"""Random calls of `scaled_dot_product_attention`: everything selected is softmax attention; nothing else leaks in."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import hsa

KINDS = ("clustered", "multiscale", "hierarchical")
EVERYTHING = {"clustered": {"top_k": 999}, "multiscale": {"top_k": 999}, "hierarchical": {"branching": (999,)}}


@st.composite
def calls(draw, longest):
    """Draw query, key, value, which keys are tokens, `[batch, keys]`, and options."""
    kind = draw(st.sampled_from(KINDS))
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    keys, dim, value_dim = draw(st.integers(1, longest)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    causal = kind != "hierarchical" and draw(st.booleans())
    is_self = kind == "hierarchical" or causal or draw(st.booleans())
    queries = keys if is_self else draw(st.integers(1, longest))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    sharp = draw(st.sampled_from([0.3, 1.0, 4.0]))
    q = torch.randn(batch, kv_heads * group, queries, dim, dtype=torch.float64) * sharp
    k, v = (torch.randn(batch, kv_heads, keys, d, dtype=torch.float64) for d in (dim, value_dim))
    if draw(st.booleans()):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    tokens = torch.rand(batch, keys) < draw(st.sampled_from([0.4, 0.9, 2.0]))
    tokens[torch.arange(batch), torch.randint(keys, (batch,))] = True
    small = {
        "branching": draw(st.sampled_from([(2, 2, 4), (4, 2, 2), (8, 8, 4)])),
        "tile": draw(st.sampled_from([1, 4, 16])),
    }
    options = {
        "kind": kind,
        "is_causal": causal,
        **(small if causal else {}),
        "enable_gqa": group > 1,
        "scale": draw(st.sampled_from([None, 0.7])),
    }
    return q, k, v, tokens, options


def mask_of(tokens, queries, draw):
    """Return the tokens as a mask of a random form."""
    mask = tokens[:, None, None]
    if draw(st.booleans()):
        mask = mask.expand(-1, 1, queries, -1)
    if draw(st.booleans()):
        low = draw(st.sampled_from([-torch.inf, torch.finfo(torch.float32).min]))
        return torch.zeros(mask.shape).masked_fill(~mask, low)
    return mask


@given(calls(40), st.data())
def test_everything_selected_is_softmax_attention(call, data):
    q, k, v, tokens, options = call
    everything = EVERYTHING[options["kind"]]
    if options["is_causal"]:
        everything = data.draw(st.sampled_from([everything, {"threshold": 1e-30}]))
    is_self = q.shape[2] == k.shape[2]
    out = hsa.scaled_dot_product_attention(q, k, v, mask_of(tokens, q.shape[2], data.draw), **options, **everything)
    mask = tokens[:, None, None].expand(-1, 1, q.shape[2], -1)
    if options["is_causal"]:
        mask = mask & torch.ones(mask.shape[2:], dtype=torch.bool).tril()
    rest = {name: options[name] for name in ("scale", "enable_gqa")}
    expected = F.scaled_dot_product_attention(q, k, v, mask, **rest)
    rows = tokens if is_self else torch.ones(len(q), q.shape[2], dtype=torch.bool)
    torch.testing.assert_close(out.transpose(1, 2)[rows], expected.transpose(1, 2)[rows], rtol=1e-9, atol=1e-9)


@given(calls(300), st.integers(0, 4), st.sampled_from([None, 1 / 4, 1 / 64]))
def test_padding_the_batch_and_later_tokens_do_not_matter(call, top_k, threshold):
    q, k, v, tokens, options = call
    if options["is_causal"] and threshold is not None:
        options["threshold"] = threshold
    elif options["kind"] == "multiscale" and options["is_causal"] and top_k == 0:
        del options["branching"]  # a tree of windows; only neighbours are exact
    elif options["kind"] != "hierarchical":
        options["top_k"] = max(top_k, int(options["kind"] == "clustered" or q.shape[2] != k.shape[2]))
    is_self = q.shape[2] == k.shape[2]
    attend = hsa.scaled_dot_product_attention
    out = attend(q, k, v, tokens[:, None, None], **options)
    rows = tokens if is_self else torch.ones(len(q), q.shape[2], dtype=torch.bool)
    hidden = [x.clone() for x in (q, k, v)]
    for x in hidden if is_self else hidden[1:]:
        x.transpose(1, 2)[~tokens] = torch.nan
    again = attend(*hidden, tokens[:, None, None], **options)
    torch.testing.assert_close(again.transpose(1, 2)[rows], out.transpose(1, 2)[rows], rtol=1e-9, atol=1e-9)
    alone = [x[:1][:, :, tokens[0]] for x in (k, v)]
    mine = q[:1][:, :, tokens[0]] if is_self else q[:1]
    if is_self or mine.shape[2] != alone[0].shape[2]:  # equal lengths are taken for self-attention
        expected = out[:1][:, :, tokens[0]] if is_self else out[:1]
        torch.testing.assert_close(attend(mine, *alone, **options), expected, rtol=1e-9, atol=1e-9)
    if options["is_causal"]:
        half = q.shape[2] // 2
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, half:] = 1
        later = attend(*changed, tokens[:, None, None], **options)
        seen = tokens[:, :half]
        torch.testing.assert_close(
            later[:, :, :half].transpose(1, 2)[seen], out[:, :, :half].transpose(1, 2)[seen], rtol=1e-9, atol=1e-9
        )

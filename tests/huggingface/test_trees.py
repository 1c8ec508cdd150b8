"""Trees of converted layers: windows, sentences, special tokens, and functions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.huggingface import convert
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings
from hsa.huggingface.trees import sentence_tree, tree_of
from hsa.huggingface.vocabulary import Vocabulary
from tests.huggingface.tiny_models import CLS, SEP, byte_tokenizer, random_ids, run, tiny, word_tokenizer

pytest.importorskip("sentencex")

SENTENCES = ["The cat sat on the mat .", "A dog ran here , it was the dog !", "A cat was here ?", "The mat ."]
LETTERS = ["The naïve café has closed.", "Why?", "Zoë said so — “très bien”, twice.", "It cost 3.50 in all!"]


def starts_of(parts):
    """Return which tokens are the first of a part."""
    sizes = [len(part) for part in parts]
    starts = np.zeros(sum(sizes), bool)
    starts[np.cumsum(sizes) - sizes] = True
    return starts


def joined(parts):
    return [token for part in parts for token in part]


def test_sentences_of_whole_words():
    tokenizer = word_tokenizer()
    words = [tokenizer.encode(sentence, add_special_tokens=False) for sentence in SENTENCES]
    cut = [words[0][:3], [SEP], words[0][3:]]  # special tokens end a sentence too
    documents = [[[CLS], *words, [SEP]], [[CLS], *words[1:3], [SEP]], [[CLS], *cut, words[3], [SEP]]]
    ids = [joined(parts) for parts in documents]
    assert ids[0] == tokenizer(" ".join(SENTENCES))["input_ids"]
    result = Vocabulary.of(tokenizer).sentence_starts(joined(ids), [len(i) for i in ids])
    assert result.tolist() == np.concatenate([starts_of(parts) for parts in documents]).tolist()


def test_sentences_of_byte_pairs():
    """Tokens may start with a space, be a space (part of the sentence before), or be a part of a letter."""
    tokenizer = byte_tokenizer([*LETTERS[:2], " Why Why Why"])
    parts = [tokenizer.encode(sentence) for sentence in LETTERS]
    parts[1] = tokenizer.encode(" " + LETTERS[1])
    space = tokenizer.encode(" ")
    parts[1], parts[2] = parts[1] + space, parts[2] + space
    assert tokenizer.decode(parts[1][0]) == " Why"
    whole = tokenizer.encode(" ".join(LETTERS))
    assert joined(parts) == whole
    assert len(whole) > 60
    result = Vocabulary.of(tokenizer).sentence_starts(whole * 2, [len(whole)] * 2)
    assert result.tolist() == starts_of(parts * 2).tolist()
    first, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    result = Vocabulary.of(tokenizer).sentence_starts([first, *whole, end], [len(whole) + 2])
    assert result.tolist() == starts_of([[first], *parts, [end]]).tolist()


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=7), min_size=1, max_size=3),
    st.sampled_from([(4,), (4, 2), (3, 2, 3)]),
    st.booleans(),
)
def test_trees_of_sentences(documents, branching, repeat_last):
    """Leaf families are pieces of a sentence, each sentence is a node, and nodes above it are full."""
    starts = np.concatenate([starts_of([range(size) for size in sizes]) for sizes in documents])
    lengths = [sum(sizes) for sizes in documents]
    tree = sentence_tree(starts, lengths, branching, repeat_last)
    assert tree.lengths == lengths
    first_of_documents = np.cumsum(lengths) - lengths
    unsaid = starts.copy()
    unsaid[first_of_documents] = False
    assert sentence_tree(unsaid, lengths, branching, repeat_last) == tree
    first, end, height = (tree.tensor(name).numpy() for name in ("first_leaf", "end_leaf", "height"))
    nodes = list(zip(first.tolist(), end.tolist(), strict=True))
    ends = np.append(np.flatnonzero(starts)[1:], len(starts))
    sentences = set(zip(np.flatnonzero(starts).tolist(), ends.tolist(), strict=True))
    assert sentences <= set(nodes)
    sentence = np.cumsum(starts)
    for node in np.flatnonzero(height == 1):
        assert end[node] - first[node] <= branching[0]
        assert len(set(sentence[first[node] : end[node]])) == 1
    if repeat_last and len(branching) > 1:
        above = [node for node, leaves in enumerate(nodes) if height[node] > 1 and leaves not in sentences]
        assert all(tree.num_children[node] <= max(branching[1:]) for node in above)


def sequences(tokenizer=None):
    ids, mask = random_ids()
    ids = ids.where(ids < 22, ids % 18 + 4) * mask
    ids[:, 0], ids[:, 20] = CLS, SEP
    vocabulary = Vocabulary.of(tokenizer) if tokenizer else None
    return Sequences(mask.bool(), causal=False, ids=ids, vocabulary=vocabulary), ids, mask.bool()


def test_windows_and_special_tokens():
    """Special tokens are children of the root, and windows restart after them."""
    known, ids, mask = sequences(word_tokenizer())
    special = ((ids == CLS) | (ids == SEP))[mask].numpy()
    assert special.sum() == 6
    lengths = mask.sum(1).tolist()
    for kind, repeats in (("multiscale", True), ("hierarchical", False)):
        for sinks, given_sinks in ((None, None), (2, 2), ("special", special)):
            settings = LayerSettings(kind=kind, branching=(4, 2), sinks=sinks)
            expected = Hierarchy.regular(lengths, (4, 2), repeat_last=repeats, sinks=given_sinks)
            assert tree_of(settings, known) == expected
            assert tree_of(settings, known) is tree_of(settings, known)
    sentences = LayerSettings(kind="multiscale", tree="sentences", branching=(4, 2), sinks="special")
    tree = tree_of(sentences, known)
    assert tree != tree_of(LayerSettings(kind="multiscale", branching=(4, 2), sinks="special"), known)
    assert tree.lengths == lengths
    leaf = tree.tensor("leaf_nodes")
    under_root = tree.parent[tree.parent[leaf]] < 0
    assert under_root[torch.as_tensor(special)].all()


def test_batches_of_the_same_lengths_share_their_tree():
    """Kernel plans are stored in the tree. Other special tokens need another tree."""
    settings = LayerSettings(kind="multiscale", branching=(4, 2), sinks="special")
    (one, _, _), (other, ids, _) = sequences(word_tokenizer()), sequences(word_tokenizer())
    assert tree_of(settings, one) is tree_of(settings, other)
    third, ids, _ = sequences(word_tokenizer())
    ids[0, 20], ids[0, 21] = 9, SEP
    assert tree_of(settings, third) != tree_of(settings, one)


def test_trees_from_a_function():
    seen = []

    def trees(ids):
        seen.append(ids)
        return Hierarchy.regular([len(i) for i in ids], (5, 3))

    ids, mask = random_ids()
    model = tiny("bert")
    own = run(convert(model, kind="multiscale", tree=trees, top_k=1), input_ids=ids, attention_mask=mask)
    assert len(seen) == 1  # once for all layers
    for given_ids, row, present in zip(seen[0], ids, mask.bool(), strict=True):
        assert torch.equal(given_ids, row[present])
    same = convert(model, kind="multiscale", branching=(5, 3), top_k=1, sinks=None)
    regular = run(same, input_ids=ids, attention_mask=mask)[mask.bool()]
    torch.testing.assert_close(own[mask.bool()], regular)  # the last factor repeats, but two suffice here
    for wrong, message in (
        (
            lambda ids: Hierarchy.regular([len(i) - 1 for i in ids], (4, 2)),
            r"expected trees of 41, 29, 37 leaves, .*, got trees of 40, 28, 36 leaves",
        ),
        (
            lambda ids: Hierarchy.regular([41, 41, 41], (4, 2)),
            "leaves, one per sequence, without leaves for padding",
        ),
        (lambda ids: [4, 2], r"tree\(ids\): expected an hsa.Hierarchy, got a value of type list"),
    ):
        convert(model, kind="multiscale", tree=wrong)
        with pytest.raises(InvalidInput, match=message):
            run(model, input_ids=ids, attention_mask=mask)


def test_sentences_change_the_output():
    """A full stop at another position changes the tree and so the output."""
    tokenizer = word_tokenizer()
    text = "The cat sat on the mat . A dog ran here , it was the dog ! The mat was here . it was the cat ."
    ids = torch.tensor([tokenizer.encode(text)])
    model = tiny("bert")
    settings = {"branching": (16, 2), "top_k": 0, "sinks": "special", "tokenizer": tokenizer}
    convert(model, [0], kind="multiscale", tree="sentences", **settings)
    starts = Vocabulary.of(tokenizer).sentence_starts(ids[0].tolist(), [ids.shape[1]])
    before = run(model, input_ids=ids)
    assert (run(convert(model, [0], kind="multiscale", **settings), input_ids=ids) - before).abs().max() > 1e-3

    def trees(ids):
        special = np.isin(ids[0].numpy(), (CLS, SEP))
        return sentence_tree(starts, [len(ids[0])], (16, 2), True, special)

    convert(model, [0], kind="multiscale", tree=trees, top_k=0)
    torch.testing.assert_close(run(model, input_ids=ids), before)


def test_sentences_without_a_tokenizer():
    known, _, _ = sequences()
    with pytest.raises(InvalidInput, match=r"tokenizer: not given; expected .*convert\(model, tokenizer=…\)"):
        tree_of(LayerSettings(kind="multiscale", tree="sentences"), known)

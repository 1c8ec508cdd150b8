"""Answers equal those of a direct pass of the model, and scores follow their definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.huggingface import convert, counting
from hsa.huggingface.fidelity.examples import Examples
from hsa.huggingface.fidelity.judge import TASKS, Answers, Judge, score_classes, spearman, wilson_interval
from hsa.huggingface.fidelity.next_tokens import STRIDE
from hsa.huggingface.fidelity.pieces import cut_pieces
from tests.huggingface.fidelity.small import CHEAP, LONGEST, classifier, examples, language_model, tokenizer


def judge_of(task, model, some=None, **options):
    return Judge(
        examples(9, least=3) if some is None else some, task, model, tokenizer(), **{"longest": LONGEST, **options}
    )


@torch.no_grad()
def direct(model, some, **options):
    """Run the model on one text at a time, without padding."""
    known = tokenizer()
    for texts in some.texts:
        yield model(**known(*texts, truncation=True, max_length=LONGEST, return_tensors="pt"), **options)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("batch_tokens", [1, 100, 10_000])
def test_classes_are_those_of_a_direct_pass(parts, batch_tokens):
    model, some = classifier(), examples(9, parts=parts, least=3, most=29)
    answers = judge_of("classification", model, some, batch_tokens=batch_tokens).ask(model)
    wanted = torch.cat([out.logits.softmax(-1) for out in direct(model, some)])
    np.testing.assert_allclose(answers.values, wanted, atol=1e-5)
    assert answers.values.std(0).min() > 1e-3  # a wrong order would show


def test_embeddings_are_those_of_a_direct_pass():
    model, some = classifier().bert, examples(7, least=3)
    answers = judge_of("embedding", model, some, batch_tokens=100).ask(model)
    wanted = [torch.nn.functional.normalize(out.last_hidden_state.mean(1)) for out in direct(model, some)]
    np.testing.assert_allclose(answers.values, torch.cat(wanted), atol=1e-5)


def test_texts_of_a_pair_are_embedded_separately():
    model, pairs = classifier().bert, examples(8, parts=2, least=3)
    judge = judge_of("embedding", model, pairs)
    assert len(judge) == 16
    answers = judge.ask(model)
    for part in (0, 1):
        alone = Examples("alone", [(texts[part],) for texts in pairs.texts])
        one = judge_of("embedding", model, alone)
        np.testing.assert_allclose(answers.values[part::2], one.ask(model).values, atol=1e-5)
        assert one.scores(one.ask(model)) == {}
    cosine = (answers.values[0::2] * answers.values[1::2]).sum(1)
    assert judge.scores(answers) == {"spearman": spearman(cosine, np.array(pairs.labels))}
    alike = judge_of("embedding", model, Examples("a", pairs.texts, [str(c) for c in cosine]))  # as CSV has them
    assert alike.scores(answers)["spearman"] == pytest.approx(1)
    with pytest.raises(InvalidInput, match=r"a: label: .*'maybe'; expected a number for the similarity of two texts"):
        judge_of("embedding", model, Examples("a", pairs.texts, ["maybe"] * 8))


@pytest.mark.parametrize("warm_up", [0, 11])
def test_perplexity_is_that_of_the_models_own_loss(warm_up):
    model, some = language_model(), examples(4, labels=False)
    judge = judge_of("lm", model, some, longest=29, warm_up=warm_up, batch_tokens=60)
    assert set(judge.tokens.lengths) == {29}
    ids = torch.tensor(judge.tokens.ids)
    labels = ids.clone()
    labels[:, : warm_up + 1] = -100
    with torch.no_grad():
        wanted = model(ids, labels=labels).loss.exp()
    result = judge.scores(judge.ask(model))
    assert result == {"perplexity": pytest.approx(float(wanted), rel=1e-5)}
    assert len(judge) == 4  # a piece of each text
    pieces = cut_pieces(some, tokenizer(), 29, 3)
    assert judge_of("lm", model, pieces, longest=29).tokens.ids == pieces.ids


def test_examples_that_do_not_fit():
    model = language_model()
    with pytest.raises(InvalidInput, match=r"task: expected one of classification, embedding, lm, got 'guess'"):
        judge_of("guess", model)
    with pytest.raises(
        InvalidInput,
        match=r"small: expected at least 5,000 tokens, .*, got \d+ tokens. Pass smaller --max-tokens",
    ):
        judge_of("lm", model, longest=5000)
    for longest, warm_up in ((1, 0), (12, 11)):
        with pytest.raises(InvalidInput, match=f"max_tokens: expected more than {warm_up + 1}, to .*, got {longest}$"):
            judge_of("lm", model, longest=longest, warm_up=warm_up)
    for task in TASKS:
        with pytest.raises(InvalidInput, match="none: no texts; expected at least one text"):
            judge_of(task, model, Examples("none", [], []))
    with pytest.raises(InvalidInput, match=r"examples: expected examples, with task 'embedding', got pieces of texts"):
        judge_of("embedding", model, cut_pieces(examples(2), tokenizer(), 29))
    with pytest.raises(InvalidInput, match="small: no labels"):
        judge_of("classification", classifier(), examples(3, labels=False))


def test_operations_are_counted_on_hierarchical_attention_only():
    model, some = classifier(), examples(5)
    judge = judge_of("classification", model, some)
    before = judge.ask(model)
    assert before.counted.layers == before.counted.exact == {}
    convert(model, [1], **vars(CHEAP))
    after = judge.ask(model).counted
    assert set(after.layers) == set(after.exact) == {0, 1}
    assert after.layers[0].total == after.exact[0] == after.exact[1] > after.layers[1].total
    with counting() as counted:
        list(direct(model, some))
    assert counted == after  # padding costs nothing


def test_watch_counts_every_example():
    model, done = classifier(), []
    judge = judge_of("classification", model, batch_tokens=60)
    judge.ask(model.train(), done.append)
    assert not model.training  # no dropout
    assert (sum(done), len(done) > 1) == (len(judge), True)


@pytest.mark.parametrize("task", TASKS)
def test_equal_answers_have_distance_zero(task):
    model = language_model() if task == "lm" else classifier()
    model = model.bert if task == "embedding" else model
    judge = judge_of(task, model, examples(6), longest=41)
    before = judge.ask(model)
    assert judge.distance(before, before) == pytest.approx(0, abs=1e-6)
    same = judge.compare(before, before)
    assert same == pytest.approx(
        {
            "classification": {"kept": 1, "kept low": wilson_interval(6, 6)[0], "kept high": 1},
            "embedding": {"cosine": 1, "lowest cosine": 1},
            "lm": {"perplexity change": 0, "perplexity change error": 0},
        }[task]
    )
    again = judge.ask(model, against=before)
    assert judge.distance(before, again) == pytest.approx(0, abs=1e-6)
    after = judge.ask(convert(model, **vars(CHEAP)), against=before)
    change = judge.distance(before, after)
    assert change > 1e-5
    if task == "lm":
        assert again.divergences.tolist() == [0] * len(judge)
        assert (after.divergences > 0).all()
        ratio = judge.scores(after)["perplexity"] / judge.scores(before)["perplexity"]
        result = judge.compare(before, after)
        added = (after.values - before.values).flatten()
        assert result["perplexity change"] == pytest.approx(ratio - 1)
        assert result["perplexity change error"] == pytest.approx(np.std(added, ddof=1) / len(added) ** 0.5)
        one = judge_of(task, model, examples(1), longest=41)
        assert list(one.compare(one.ask(model), one.ask(model))) == ["perplexity change"]
    else:
        moved = judge.compare(before, after)
        assert min(moved.values()) <= next(iter(moved.values()))
    if task == "embedding":
        assert moved["cosine"] == pytest.approx(1 - change)


@pytest.mark.parametrize(("warm_up", "batch_tokens"), [(0, 60), (11, 1)])
def test_distances_of_language_models_are_divergences_of_their_predictions(warm_up, batch_tokens):
    model = language_model()
    judge = judge_of("lm", model, examples(3), longest=41, warm_up=warm_up, batch_tokens=batch_tokens)
    before = judge.ask(model)
    logs = predictions(model, judge)
    convert(model, **vars(CHEAP))
    after = judge.ask(model, against=before)
    changed = predictions(model, judge)
    each = (logs.exp() * (logs - changed)).sum(-1)[:, warm_up:-1:STRIDE]
    np.testing.assert_allclose(after.divergences, each.mean(1), rtol=1e-4, atol=1e-7)
    assert judge.distance(before, after) == pytest.approx(float(each.mean()), rel=1e-4)
    for other, message in (
        (after, "against: expected those .*, got answers without states"),
        (judge.ask(model), "after: not"),
    ):
        with pytest.raises(InvalidInput, match=message):
            judge.ask(model, against=other) if other is after else judge.distance(before, other)


@torch.no_grad()
def predictions(model, judge):
    return model(torch.tensor(judge.tokens.ids)).logits.log_softmax(-1)


def test_divergence_of_certain_answers_is_finite():
    judge = judge_of("classification", classifier())
    sure, other = (Answers("classification", np.eye(2, dtype=np.float32)[[i, i]]) for i in (0, 1))
    assert 10 < judge.distance(sure, other) < math.inf
    assert judge.compare(sure, other)["kept"] == 0


@given(data=st.data(), classes=st.integers(2, 5), count=st.integers(1, 40))
def test_scores_of_classes_by_definition(data, classes, count):
    one = st.lists(st.integers(0, classes - 1), min_size=count, max_size=count)
    predicted, true = (np.array(data.draw(one)) for _ in range(2))
    result = score_classes(predicted, true, classes)
    rows = []
    for c in sorted({*predicted.tolist(), *true.tolist()}):
        hits = sum(p == t == c for p, t in zip(predicted, true, strict=True))
        given, there = sum(predicted == c), sum(true == c)
        rows.append((hits / given if given else 0, hits / there if there else 0, 2 * hits / (given + there)))
    precision, recall, f1 = np.mean(rows, 0)
    wanted = {"accuracy": (predicted == true).mean(), "precision": precision, "recall": recall, "f1": f1}
    # Matthews' correlation is that of the indicators of classes.
    x, y = (np.eye(classes)[v] - np.eye(classes)[v].mean(0) for v in (predicted, true))
    spread = math.sqrt((x * x).sum() * (y * y).sum())
    wanted["matthews"] = (x * y).sum() / spread if spread > 1e-9 else 0
    assert result == pytest.approx(wanted, abs=1e-9)
    assert next(iter(result)) == "accuracy"


def ranks(values):
    """Return the mean position of each value in the sorted list."""
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_spearman_with_ties(pairs):
    a, b = (np.array(side, float) for side in zip(*pairs, strict=True))
    x, y = (np.array(ranks(side)) - (len(side) + 1) / 2 for side in (a, b))
    spread = math.sqrt((x @ x) * (y @ y))
    assert spearman(a, b) == pytest.approx(x @ y / spread if spread else 0)


@given(total=st.integers(1, 5000), share=st.floats(0, 1))
def test_intervals_contain_the_proportion(total, share):
    hits = round(share * total)
    low, high = wilson_interval(hits, total)
    assert 0 <= low <= hits / total + 1e-12
    assert hits / total - 1e-12 <= high <= 1
    for edge in (e for e in (low, high) if 1e-9 < e < 1 - 1e-9):  # where the share would be 1.96 deviations away
        assert abs(hits / total - edge) == pytest.approx(
            1.96 * math.sqrt(edge * (1 - edge) / total), rel=1e-6, abs=1e-9
        )

"""The search for settings: budgets, path, resumption, and the state of the model afterwards."""

import itertools
import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.huggingface import convert, settings_of
from hsa.huggingface.conversion import convert_as
from hsa.huggingface.fidelity import calibrate as calibration
from hsa.huggingface.fidelity.calibrate import CANDIDATES, CAUSAL_CANDIDATES, Budget, calibrate, trace_hull
from hsa.huggingface.fidelity.judge import Judge
from tests.huggingface.fidelity.small import (
    CHEAP,
    CLUSTERED,
    LONGEST,
    NEAR,
    classifier,
    examples,
    language_model,
    tokenizer,
)

WAYS = (CHEAP, NEAR)


@pytest.fixture
def model():
    return classifier()


@pytest.fixture
def judge(model):
    return Judge(examples(4), "classification", model, tokenizer(), longest=LONGEST)


@pytest.fixture
def asked(monkeypatch):
    """Record the converted layers of each pass over the examples."""
    seen, ask = [], Judge.ask
    monkeypatch.setattr(
        Judge, "ask", lambda self, model, *rest: (seen.append(settings_of(model)), ask(self, model, *rest))[1]
    )
    return seen


@pytest.mark.parametrize(
    ("text", "metric", "value"),
    [
        ("ops 4x", "ops", 4),
        ("ops4", "ops", 4),
        ("Accuracy -0.5", "accuracy", -0.5),
        ("accuracy -.5 points", "accuracy", -0.5),
        (" kept 98% ", "kept", 98),
        ("cosine 0.985", "cosine", 0.985),
        ("perplexity +1%", "perplexity", 1),
        ("f1 -1 point", "f1", -1),
    ],
)
def test_budgets(text, metric, value):
    assert Budget.parse(text) == Budget(metric, value)


@pytest.mark.parametrize("text", ["", "ops", "4x", "ops fast", "ops 1.2.3", "ops .", "ops 4y", "ops 4x more", "kept -"])
def test_texts_that_are_not_budgets(text):
    with pytest.raises(InvalidInput, match=rf"budget: expected a metric and a value.*, got {re.escape(repr(text))}$"):
        Budget.parse(text)


def test_points_that_keep_to_a_budget():
    original = {"accuracy": 0.9, "perplexity": 10.0}
    point = {
        "ops": 3.0,
        "accuracy": 0.896,
        "kept": 0.985,
        "cosine": 0.99,
        "perplexity change": 0.01,
        "perplexity": 10.1,
    }
    for text, wanted in {
        "ops 3x": True,
        "ops 3.1x": False,
        "accuracy -0.5": True,
        "accuracy -0.3": False,
        "kept 98%": True,
        "kept 99%": False,
        "cosine 0.985": True,
        "cosine 0.995": False,
        "perplexity +1%": True,
        "perplexity +0.9%": False,
    }.items():
        assert Budget.parse(text).holds(point, original) is wanted


@given(
    st.lists(st.tuples(st.floats(0, 1.2), st.floats(-1, 10)), max_size=12),
    st.tuples(st.floats(0.5, 1), st.floats(0, 1)),
)
def test_the_hull_is_convex(points, first):
    ways = [(*point, index) for index, point in enumerate(points)]
    taken = trace_hull((*first, None), ways)
    slopes = [slope for slope, _ in taken]
    assert slopes == sorted(slopes)
    operations = [first[0], *(points[index][0] for _, index in taken)]
    assert all(later < earlier for earlier, later in itertools.pairwise(operations))
    assert operations[-1] == min([first[0], *(p[0] for p in points)])  # down to the cheapest
    # No option lies below the line between neighbours on the hull.
    corners = [first, *(points[index] for _, index in taken)]
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        for x, y in points:
            if x1 <= x < x0 and x0 - x1 > 1e-6:
                assert y >= y1 + (y0 - y1) * (x - x1) / (x0 - x1) - 1e-6 * (1 + abs(y0) + abs(y1))


def test_a_budget_of_operations(model, judge):
    result = calibrate(model, judge, "ops 1.5x", candidates=WAYS)
    assert result.holds
    assert settings_of(model) == {}
    assert model.config._attn_implementation == "sdpa"
    chosen = [point for point in result.frontier if point["chosen"]]
    assert len(chosen) == 1
    cheap_enough = [point for point in result.frontier if point["ops"] >= 1.5]
    assert chosen[0] is cheap_enough[0] or chosen[0] == cheap_enough[0]  # the most faithful of them
    assert [point["step"] for point in result.frontier] == sorted({point["step"] for point in result.frontier})
    ops = [point["ops"] for point in result.frontier]
    assert ops == sorted(ops)
    assert ops[0] == 1
    after = judge.ask(convert_as(model, result.settings))
    assert after.counted.ratio == pytest.approx(chosen[0]["ops"])
    assert {replace(s, pooled_bias=0.0) for s in result.settings.values()} <= set(WAYS)
    assert {(row["layer"], json.dumps(row["settings"])) for row in result.sensitivities} == {
        (layer, json.dumps(way.to_json())) for layer in (0, 1) for way in WAYS
    }
    for row in result.sensitivities:
        assert row["distance"] > 0
        assert 0 < row["ops"] < 1


def test_a_budget_that_nothing_keeps_to(model, judge):
    result = calibrate(model, judge, "ops 1000x", candidates=WAYS)
    assert not result.holds
    assert result.frontier[-1]["chosen"]  # the cheapest
    assert len(result.settings) == 2
    result = calibrate(model, judge, "kept 101%", candidates=WAYS)
    assert (result.holds, result.settings) == (False, {})


def test_a_budget_of_a_score(model, judge):
    result = calibrate(model, judge, "kept 0%", candidates=WAYS)
    assert result.holds
    assert max(result.frontier, key=lambda point: point["ops"])["chosen"]  # the cheapest


def test_every_layer(model, judge):
    result = calibrate(model, judge, "kept 101%", candidates=WAYS, every_layer=True)
    assert set(result.settings) == {0, 1}
    assert {point["converted"] for point in result.frontier} == {2}
    nearest = {
        layer: min((row for row in result.sensitivities if row["layer"] == layer), key=lambda row: row["distance"])
        for layer in (0, 1)
    }
    for layer, settings in result.settings.items():
        assert replace(settings, pooled_bias=0.0).to_json() == nearest[layer]["settings"]


def test_sliding_layers_stay_exact():
    model = classifier("ModernBert", num_hidden_layers=4, local_attention=8, cls_token_id=1, sep_token_id=2)
    known = tokenizer()
    known.model_input_names = ["input_ids", "attention_mask"]
    judge = Judge(examples(4), "classification", model, known, longest=LONGEST)
    result = calibrate(model, judge, "ops 1000x", candidates=WAYS, every_layer=True)
    assert set(result.settings) == {0, 3}


def test_measurements_are_reused(model, judge, tmp_path, asked):
    first = calibrate(model, judge, "ops 1.5x", candidates=WAYS, folder=tmp_path)
    fresh = len(asked)
    assert fresh > 2 + 2 * len(WAYS)
    asked.clear()
    again = calibrate(model, judge, "ops 1.5x", candidates=WAYS, folder=tmp_path)
    assert again == first
    assert asked == [
        {},
        {n: replace(s, pooled_bias=0.0) for n, s in first.settings.items()},
    ]  # original, and its biases
    asked.clear()
    calibrate(model, judge, "ops 1.5x", candidates=WAYS[:1], folder=tmp_path)
    assert len(asked) > 2  # other candidates are measured again
    assert {s for layers in asked for s in layers.values() if not s.pooled_bias} == set(WAYS[:1])


def test_an_interrupted_search_resumes(model, judge, tmp_path, asked, monkeypatch):
    wanted = calibrate(model, judge, "ops 1.5x", candidates=WAYS)
    whole = len(asked)
    asked.clear()
    counted = Judge.ask

    def breaks(self, model, *rest):
        if len(asked) == 4:
            raise KeyboardInterrupt
        return counted(self, model, *rest)

    monkeypatch.setattr(Judge, "ask", breaks)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, judge, "ops 1.5x", candidates=WAYS, folder=tmp_path)
    assert settings_of(model) == {}
    monkeypatch.setattr(Judge, "ask", counted)
    asked.clear()
    assert calibrate(model, judge, "ops 1.5x", candidates=WAYS, folder=tmp_path) == wanted
    assert len(asked) == whole - 3  # the original is measured again


@pytest.mark.parametrize("change", ["weights", "labels"])
def test_another_model_and_other_labels_are_measured_again(model, judge, tmp_path, asked, change):
    calibrate(model, judge, "ops 1.5x", candidates=WAYS, folder=tmp_path)
    whole = len(asked)
    asked.clear()
    if change == "weights":
        with torch.no_grad():  # a change too small to show in three digits of an answer
            for weight in model.parameters():
                weight.mul_(1 + 1e-6)
    else:
        judge.labels = 1 - judge.labels
    result = calibrate(model, judge, "ops 1.5x", candidates=WAYS, folder=tmp_path)
    assert abs(len(asked) - whole) <= 1  # the biases may differ
    assert result.frontier[0]["accuracy"] == judge.scores(judge.ask(model))["accuracy"]


def test_biases_only_where_they_help(model, judge, monkeypatch):
    before = judge.ask(model)

    def distance(bias):
        settings = dict.fromkeys((0, 1), replace(CHEAP, pooled_bias=bias))
        return judge.distance(before, judge.ask(convert_as(model, settings)))

    least, good = min((distance((bias,) * 4), bias) for bias in (-2.0, -1.0, 1.0, 2.0))
    assert least < distance(0.0)
    monkeypatch.setattr(calibration, "BIASES", (good,))
    nearness = Judge.distance
    for sign, wanted in ((1, (good,) * 4), (-1, 0.0)):  # with a bias that helps, and one that hurts
        monkeypatch.setattr(Judge, "distance", lambda self, *both, sign=sign: sign * nearness(self, *both))
        result = calibrate(model, judge, "ops 1000x", candidates=[CHEAP]).settings
        assert {settings.pooled_bias for settings in result.values()} == {wanted}


def test_biases_do_not_break_the_budget(model, judge, monkeypatch):
    search = calibration._Search(model, judge, WAYS, None, None, lambda *_: None)
    plain = {0: CHEAP}
    measured = {"distance": 1.0, "kept": 0.99}
    nearer_but_worse = {"distance": 0.5, "kept": 0.9}
    monkeypatch.setattr(search, "measure", lambda settings: measured if settings == plain else nearer_but_worse)
    monkeypatch.setattr(calibration, "BIASES", (0.5,))
    assert search.with_biases(plain, Budget("kept", 98)) == plain
    assert search.with_biases(plain, Budget("kept", 80)) != plain


def test_budgets_of_unknown_metrics(model, judge):
    with pytest.raises(InvalidInput, match=r"budget: expected one of ops, accuracy, .*, kept, got 'speed'$"):
        calibrate(model, judge, "speed 2x", candidates=WAYS)
    encoder = classifier().bert
    texts = Judge(examples(4, labels=False, parts=2), "embedding", encoder, tokenizer(), longest=LONGEST)
    with pytest.raises(InvalidInput, match=r"budget: expected one of ops, cosine, got 'spearman'$"):
        calibrate(encoder, texts, "spearman -1", candidates=WAYS)


def test_language_models(asked):
    model = language_model()
    judge = Judge(examples(6), "lm", model, tokenizer(), longest=LONGEST)
    result = calibrate(model, judge, "perplexity +1000%", candidates=[CHEAP])
    assert result.holds
    assert "perplexity" in result.frontier[0]


def test_the_search_of_a_converted_model_starts_from_exact_attention(model, judge, asked):
    wanted = calibrate(model, judge, "ops 1.5x", candidates=WAYS)
    convert(model, **vars(CLUSTERED))
    asked.clear()
    assert calibrate(model, judge, "ops 1.5x", candidates=WAYS) == wanted
    assert asked[0] == settings_of(model) == {}


def test_watch_is_called_at_the_end_of_each_stage(model, judge):
    heard = {}
    calibrate(
        model, judge, "ops 1.5x", candidates=WAYS, watch=lambda what, done, total: heard.update({what: (done, total)})
    )
    assert len(heard) == 3
    assert all(done == total for done, total in heard.values())


def test_candidates_differ():
    for candidates, causal in ((CANDIDATES, False), (CAUSAL_CANDIDATES, True)):
        assert len(set(candidates)) == len(candidates)
        for candidate in candidates:
            candidate.check(0, causal=causal)

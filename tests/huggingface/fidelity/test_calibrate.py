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
from hsa.huggingface.settings import LayerSettings
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
        Judge,
        "ask",
        lambda self, model, *rest, **more: (seen.append(settings_of(model)), ask(self, model, *rest, **more))[1],
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
        ("perplexity 0.5", "perplexity", 0.5),
        ("kept 0%", "kept", 0),
        ("f1 -1 point", "f1", -1),
    ],
)
def test_budgets(text, metric, value):
    assert Budget.parse(text) == Budget(metric, value)


@pytest.mark.parametrize("text", ["", "ops", "4x", "ops fast", "ops 1.2.3", "ops .", "ops 4y", "ops 4x more", "kept -"])
def test_texts_that_are_not_budgets(text):
    with pytest.raises(InvalidInput, match=rf"budget: expected a metric and a value.*, got {re.escape(repr(text))}$"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("perplexity -1%", "expected a rise in percent, such as perplexity +0.5%, got 'perplexity -1%'"),
        ("perplexity 5x", "expected a rise in percent, such as perplexity +0.5%, got 'perplexity 5x'"),
        ("perplexity 1 point", "expected a rise in percent"),
        ("ops 0.5x", "expected a factor of 1 or more, such as ops 4x, got 'ops 0.5x'"),
        ("ops -2x", "expected a factor of 1 or more"),
        ("ops 50%", "expected a factor of 1 or more"),
        ("kept 101%", "expected a share of the answers in percent, such as kept 98%, got 'kept 101%'"),
        ("kept 0.98", "expected a share of the answers in percent"),
        ("cosine 2", "expected a number up to 1, such as cosine 0.985, got 'cosine 2'"),
        ("cosine 98%", "expected a number up to 1"),
        ("accuracy 98", "expected a loss in points, such as accuracy -0.5, got 'accuracy 98'"),
        ("accuracy 2x", "expected a loss in points"),
        ("speed 2x", "expected one of ops, accuracy, kept, .*, spearman, perplexity, got 'speed'$"),
    ],
)
def test_budgets_that_make_no_sense(text, message):
    with pytest.raises(InvalidInput, match=f"^budget: {message.replace('+', '[+]')}"):
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
        budget = Budget.parse(text)
        assert budget.holds(point, original) is wanted
        assert (budget.margin(point, original) >= 0) is wanted
    for text, wanted in {
        "ops 3x": "3.00 times fewer operations",
        "accuracy -0.5": "accuracy -0.40 points at 3.00 times fewer operations",
        "kept 98%": "98.5% of the answers at 3.00 times fewer operations",
        "cosine 0.985": "cosine 0.9900 at 3.00 times fewer operations",
        "perplexity +1%": "perplexity +1.00% at 3.00 times fewer operations",
    }.items():
        assert Budget.parse(text).reached(point, original) == wanted


@pytest.mark.parametrize(
    ("text", "examples", "needed"),
    [
        ("accuracy -0.5", 100, 800),
        ("accuracy -0.5", 800, None),
        ("f1 -2", 50, 200),
        ("kept 98%", 100, 200),
        ("kept 98%", 200, None),
        ("kept 50%", 3, 4),
        ("kept 0%", 1, None),
        ("accuracy -400", 1, None),
        ("ops 2x", 1, None),
        ("cosine 0.99", 1, None),
        ("perplexity 1%", 4, 24),
    ],
)
def test_too_few_examples_for_a_budget(text, examples, needed):
    warning = Budget.parse(text).too_few(examples, {"perplexity change error": 0.012})
    assert (warning is not None) == (needed is not None)
    if warning is not None:
        assert warning.startswith(f"{examples} ")
        assert warning.endswith(f" would do: --calibrate-on {needed}")
        assert Budget.parse(text).metric == "perplexity" or Budget.parse(text).too_few(needed) is None


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
    assert result.reached == f"{judge.ask(convert_as(model, result.settings)).counted.ratio:.2f} times fewer operations"
    result = calibrate(model, judge, Budget("kept", 101), candidates=WAYS)
    assert (result.holds, result.settings) == (False, {})
    assert result.reached == "100.0% of the answers at 1.00 times fewer operations"


def test_a_budget_of_a_score(model, judge):
    result = calibrate(model, judge, "kept 0%", candidates=WAYS)
    assert result.holds
    assert max(result.frontier, key=lambda point: point["ops"])["chosen"]  # the cheapest


def test_every_layer(model, judge):
    result = calibrate(model, judge, "ops 1x", candidates=WAYS, every_layer=True)
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

    def breaks(self, model, *rest, **more):
        if len(asked) == 4:
            raise KeyboardInterrupt
        return counted(self, model, *rest, **more)

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
    search = calibration._Search(model, judge, WAYS, None, None, None, lambda *_: None)
    plain = {0: CHEAP}
    measured = {"distance": 1.0, "kept": 0.99}
    nearer_but_worse = {"distance": 0.5, "kept": 0.9}
    monkeypatch.setattr(search, "measure", lambda settings: measured if settings == plain else nearer_but_worse)
    monkeypatch.setattr(calibration, "BIASES", (0.5,))
    assert search.with_biases(plain, Budget("kept", 98)) == plain
    assert search.with_biases(plain, Budget("kept", 80)) != plain


def test_budgets_of_unknown_metrics(model, judge):
    match = (
        r"budget: expected one of ops, accuracy, .*, kept, got 'perplexity'. perplexity is a budget for the task lm$"
    )
    with pytest.raises(InvalidInput, match=match):
        calibrate(model, judge, "perplexity +1%", candidates=WAYS)
    encoder = classifier().bert
    texts = Judge(examples(4, labels=False, parts=2), "embedding", encoder, tokenizer(), longest=LONGEST)
    with pytest.raises(InvalidInput, match=r"budget: expected one of ops, cosine, got 'spearman'$"):
        calibrate(encoder, texts, "spearman -1", candidates=WAYS)


def test_language_models():
    model = language_model()
    judge = Judge(examples(6), "lm", model, tokenizer(), longest=LONGEST)
    result = calibrate(model, judge, "perplexity +1000%", candidates=[CHEAP])
    assert result.holds
    assert set(result.settings) == {0, 1}
    before = judge.ask(model)
    for row in result.sensitivities:
        alone = judge.ask(convert_as(model, {row["layer"]: CHEAP}), against=before)
        assert row["distance"] == pytest.approx(judge.distance(before, alone))
        assert row["distance"] > 0
    after = judge.ask(convert_as(model, result.settings), against=before)
    change = 100 * judge.compare(before, after)["perplexity change"]
    assert result.reached == f"perplexity {change:+.2f}% at {after.counted.ratio:.2f} times fewer operations"
    with pytest.raises(
        InvalidInput, match=r"budget: expected one of ops, perplexity, got 'kept'. kept is a budget for"
    ):
        calibrate(model, judge, "kept 98%", candidates=[CHEAP])


def test_a_perplexity_that_no_converted_layer_keeps(monkeypatch):
    """Take the point with the smallest rise, which need not be the first of the path."""
    model = language_model()
    judge = Judge(examples(6), "lm", model, tokenizer(), longest=LONGEST)
    compare = Judge.compare
    monkeypatch.setattr(
        Judge, "compare", lambda *both: {"perplexity change": 0.2 + abs(compare(*both)["perplexity change"])}
    )
    result = calibrate(model, judge, "perplexity +1%", candidates=(CHEAP, NEAR), every_layer=True)
    assert not result.holds
    assert set(result.settings) == {0, 1}
    least = min(result.frontier, key=lambda point: point["perplexity change"])
    assert least["chosen"]
    assert re.fullmatch(r"perplexity \+\d+\.\d\d% at \d\.\d\d times fewer operations", result.reached)


def test_rounding_in_half_precision_is_not_a_change(monkeypatch):
    """Distances of faithful settings are those of a model in float32, not those of rounding."""
    monkeypatch.setattr(calibration, "POINTS", 2)
    model = language_model(vocab_size=59, max_position_embeddings=600)
    known = tokenizer()
    candidates = [LayerSettings(branching=(8, 2, 2), tile=8, threshold=threshold) for threshold in (0.5, 1e-6)]
    distances = {}
    for dtype in (torch.float32, torch.bfloat16):
        judge = Judge(examples(4, least=310, most=320), "lm", model.to(dtype), known, longest=307)
        before = judge.ask(model)
        rounding = judge.distance(before, judge.ask(convert_as(model, {0: candidates[1]}), against=before))
        result = calibrate(model, judge, "ops 1000x", candidates=candidates)
        distances[dtype] = {(r["layer"], r["settings"]["threshold"]): r["distance"] for r in result.sensitivities}
    assert rounding > 1e-4
    for (layer, threshold), wanted in distances[torch.float32].items():
        result = distances[torch.bfloat16][layer, threshold]
        assert result == pytest.approx(wanted, rel=0.3, abs=rounding / 3), (layer, threshold)
    assert distances[torch.float32][0, 1e-6] < 1e-5


def test_thresholds_below_one_that_saves_nothing_are_not_tried(asked):
    model = language_model(max_position_embeddings=700)
    judge = Judge(examples(2, least=620, most=630), "lm", model, tokenizer(), longest=601)
    small = {"branching": (4, 2, 2), "tile": 8}
    candidates = (*(LayerSettings(threshold=t, **small) for t in (0.5, 1e-6, 1e-7)), LayerSettings(threshold=1e-8))
    result = calibrate(model, judge, "ops 1x", candidates=candidates)
    tried = {LayerSettings.from_json("here", row["settings"]): row["ops"] for row in result.sensitivities}
    assert set(tried) == {candidates[0], candidates[1], candidates[3]}
    assert tried[candidates[1]] >= 1
    assert not any(candidates[2] in layers.values() for layers in asked)
    assert result.holds


def test_an_interrupted_search_of_a_language_model_resumes(tmp_path, monkeypatch):
    model = language_model()
    judge = Judge(examples(6), "lm", model, tokenizer(), longest=LONGEST)
    wanted = calibrate(model, judge, "perplexity +5%", candidates=WAYS)
    ask, asked = Judge.ask, []

    def count(self, model, *rest, **more):
        asked.append(settings_of(model))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return ask(self, model, *rest, **more)

    monkeypatch.setattr(Judge, "ask", count)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, judge, "perplexity +5%", candidates=WAYS, folder=tmp_path)
    measured, _ = asked[1:3], asked.clear()
    asked += [None] * 4  # no more interruptions
    assert calibrate(model, judge, "perplexity +5%", candidates=WAYS, folder=tmp_path) == wanted
    assert asked[4] == {}  # the exact model is run again, for its predictions
    assert not [settings for settings in measured if settings in asked[5:]]


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
    assert list(heard) == ["exact model", "each layer alone", "along the path", "bias of pooled nodes"]
    assert all(done == total for done, total in heard.values())


def test_candidates_differ():
    for candidates, causal in ((CANDIDATES, False), (CAUSAL_CANDIDATES, True)):
        assert len(set(candidates)) == len(candidates)
        for candidate in candidates:
            candidate.check(0, causal=causal)
    calibration.ALL_OPEN.check(0, causal=True)

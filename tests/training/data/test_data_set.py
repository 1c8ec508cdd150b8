import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.files import save_tensors
from hsa.signals import Leaf, Sequence, Signal
from hsa.signals.batch import collate, uncollate
from hsa.training.data import data_set
from hsa.training.data.data_set import DataSet, Example, batches_by_tokens, build, split_at_random
from tests.model_inputs import num_leaves, readable
from tests.signals.random_signals import signals

LABELS = ("cat", "dog", "é")
TASKS = ("classification", "regression", "tokens")


def target(task, signal, generator):
    if task == "regression":
        return generator.normal()
    if task == "tokens":
        return tuple(generator.choice(LABELS, num_leaves(signal)).tolist())
    return str(generator.choice(LABELS))


def examples(listed, task, seed=0):
    generator = np.random.default_rng(seed)
    return [Example(signal, target(task, signal, generator), f"row {i}") for i, signal in enumerate(listed)]


def as_tuples(data):
    """Return the examples of a data set as tuples (signal, target, origin)."""
    names = [data.classes[i] for i in data.targets.tolist()] if data.classes else data.targets.tolist()
    bounds = np.cumsum([0, *data.lengths]) if data.per_leaf else None
    targets = names if bounds is None else [tuple(names[a:b]) for a, b in pairwise(bounds)]
    return list(zip(uncollate(data.batch), targets, data.names, strict=True))


def expected_tuples(listed, task):
    made = examples(listed, task)
    return [(e.signal, np.float32(e.target) if task == "regression" else e.target, e.where) for e in made]


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=20)
@given(listed=readable())
def test_a_data_set_contains_its_examples(task, listed):
    data = build(examples(listed, task), task, None if task == "regression" else LABELS)
    assert as_tuples(data) == expected_tuples(listed, task)
    assert len(data) == len(listed)
    assert data.lengths.tolist() == list(map(num_leaves, listed))


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=20)
@given(listed=readable())
def test_save_and_load(task, listed, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "set.safetensors"
    data = build(examples(listed, task), task)
    data.save(path)
    back = DataSet.load(path)
    assert as_tuples(back) == as_tuples(data)
    assert (back.classes, back.names, back.per_leaf) == (data.classes, data.names, data.per_leaf)
    assert back.targets.dtype == data.targets.dtype
    assert back.digest == data.digest
    assert back.batch.domains == data.batch.domains
    for name, values in data.batch.values.items():
        assert back.batch.values[name].dtype == values.dtype
        assert torch.equal(back.batch.values[name], values)
        assert torch.equal(back.batch.leaves[name], data.batch.leaves[name])


@pytest.mark.parametrize("largest", [255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**62])
@pytest.mark.parametrize("smallest", [0, -1, -40000, -(2**40)])
def test_integers_of_any_size_are_saved_exactly(smallest, largest, tmp_path):
    ids = [smallest, 0, largest]
    build([Example(Signal.of(ids, "id"), 0.0, "row")], "regression").save(tmp_path / "x")
    values = DataSet.load(tmp_path / "x").batch.values["id"]
    assert values.dtype == torch.int64
    assert values.tolist() == ids


def test_digests_of_different_data_differ():
    listed = [Signal.of(torch.randn(3, 5).to(dtype), "vector") for dtype in (torch.bfloat16, torch.float32)]
    same = [build([Example(listed[0], 0.5, where)], "regression") for where in ("row", "row")]
    others = [build([Example(signal, number, "row")], "regression") for signal in listed for number in (1.5, 2.5)]
    assert same[0].digest == same[1].digest
    assert len({data.digest for data in (*same, *others)}) == 5


def test_small_integers_take_little_space(tmp_path):
    build([Example(Signal.of([7] * 9999, "id"), 0.0, "row")], "regression").save(tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 5 * 9999  # 16 if all were int64


@given(st.lists(signals, min_size=1, max_size=2))
@settings(max_examples=10)
def test_values_that_are_not_tensors_are_not_saved(listed):
    data = build(examples([*listed, Leaf("cat", "text"), Leaf(1, "text")], "classification"), "classification")
    with pytest.raises(InvalidInput, match=r"values\['\w+'\]: expected .*, got leaves of several kinds, or strings"):
        data.save("nowhere")


def test_files_that_are_not_data_sets(tmp_path):
    with pytest.raises(InvalidInput, match="x: no such file; expected a data set"):
        DataSet.load(tmp_path / "x")
    save_tensors(tmp_path / "x", {"num_children": torch.zeros(3)})
    with pytest.raises(InvalidInput, match=r"x: expected a data set of hsa, got a safetensors file with other content"):
        DataSet.load(tmp_path / "x")
    save_tensors(tmp_path / "x", {"a": torch.zeros(3)}, {"hsa": json.dumps({})})
    with pytest.raises(InvalidInput, match=r"x: expected a data set of hsa, got a safetensors file with other content"):
        DataSet.load(tmp_path / "x")


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=15)
@given(listed=readable(), data=st.data())
def test_select(task, listed, data):
    whole = build(examples(listed, task), task)
    chosen = data.draw(st.lists(st.integers(0, len(listed) - 1), max_size=5))
    selected = whole.select(chosen)
    assert as_tuples(selected) == [as_tuples(whole)[i] for i in chosen]
    assert selected.classes == whole.classes


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("chosen", [[3], [-1]])
def test_select_out_of_range(task, chosen):
    whole = build(examples([Leaf(i, "text") for i in range(3)], task), task)
    with pytest.raises(InvalidInput, match=rf"trees\[0\]: expected a tree in 0\.\.2, got {chosen[0]}"):
        whole.select(chosen)


@pytest.mark.parametrize("task", ["classification", "tokens"])
def test_unknown_classes(task):
    listed = [Signal.of([3, 1], "text"), Signal.of([4], "text")]
    targets = ["cat", "cow"] if task == "classification" else [("cat", "dog"), ("cow",)]
    made = [Example(s, t, f"row {i}") for i, (s, t) in enumerate(zip(listed, targets, strict=True))]
    with pytest.raises(InvalidInput, match=r"^row 1: expected one of cat, dog, é, got the class 'cow'$"):
        build(made, task, LABELS)
    assert build(made, task).classes == (("cat", "cow") if task == "classification" else ("cat", "cow", "dog"))


def test_wrong_number_of_labels():
    made = [Example(Signal.of([3, 1], "text"), labels, f"row {len(labels)}") for labels in (("cat",) * 2, ("dog",) * 3)]
    with pytest.raises(InvalidInput, match=r"row 3: expected 2 labels, one per leaf, got 3"):
        build(made, "tokens")


@pytest.mark.parametrize("task", TASKS)
def test_no_examples(task):
    with pytest.raises(InvalidInput, match="data: empty; expected at least one example"):
        build([], task)


def test_errors_do_not_list_all_classes():
    made = [Example(Leaf(1, "text"), "cow", "row")]
    with pytest.raises(InvalidInput, match=r"one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, … 90 more, got the class 'cow'$"):
        build(made, "classification", tuple(map(str, range(100))))


def test_chunks_change_nothing(monkeypatch):
    listed = [Signal(Sequence(2), [Leaf(i, "text"), Leaf(0.5 * i, "number")]) for i in range(11)]
    whole = build(examples(listed, "classification"), "classification")
    monkeypatch.setattr(data_set, "CHUNK", 3)
    chunked = build(iter(examples(listed, "classification")), "classification")
    assert as_tuples(chunked) == as_tuples(whole)
    assert chunked.batch.hierarchy == collate(listed).hierarchy


shares = st.sampled_from([(1.0,), (0.8, 0.2), (0.5, 0.5), (0.7, 0.2, 0.1), (0.9, 0.1, 0.0), (0.25, 0.25, 0.25, 0.25)])


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=15)
@given(number=st.integers(1, 60), shares=shares, seed=st.integers(0, 9))
def test_random_splits(task, number, shares, seed):
    """Every example is in one part, and every part has its share of every class, to within one example."""
    whole = build(examples([Leaf(i, "text") for i in range(number)], task, seed), task)
    parts = list(split_at_random(whole, shares, seed))
    assert len(parts) == len(shares)
    assert sorted(name for part in parts for name in part.names) == sorted(whole.names)
    known = dict(zip(whole.names, as_tuples(whole), strict=True))
    for part, share in zip(parts, shares, strict=True):
        assert as_tuples(part) == [known[name] for name in part.names]
        if task == "classification":
            for label in range(len(whole.classes)):
                wanted = share * int((whole.targets == label).sum())
                assert abs(int((part.targets == label).sum()) - wanted) <= 1
        else:
            assert abs(len(part) - share * number) <= 1
    again = [part.names for part in split_at_random(whole, shares, seed)]
    assert again == [part.names for part in parts]


def test_splits_depend_on_the_seed_and_are_shuffled():
    whole = build(examples([Leaf(i, "text") for i in range(101)], "classification"), "classification")
    parts = {seed: [part.names for part in split_at_random(whole, (0.5, 0.5), seed)] for seed in (0, 1)}
    assert set(parts[0][0]) != set(parts[1][0])
    targets = next(iter(split_at_random(whole, (0.5, 0.5), 0))).targets.tolist()
    assert targets != sorted(targets)


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 50), st.integers(1, 7), st.randoms())
def test_batches_keep_their_budgets(lengths, budget, most, generator):
    order = list(range(len(lengths)))
    generator.shuffle(order)
    lengths = np.array(lengths, np.int64)
    batches = batches_by_tokens(lengths, budget, most, np.array(order, np.int64))
    assert [i for batch in batches for i in batch.tolist()] == order
    for batch in batches:
        assert 1 <= len(batch) <= most
        assert len(batch) == 1 or lengths[batch].sum() <= budget
    for ours, following in pairwise(batches):  # batches are as large as possible
        assert len(ours) == most or lengths[ours].sum() + lengths[following[0]] > budget

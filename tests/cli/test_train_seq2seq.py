"""`hsa train --task seq2seq`, from the command line."""

import json

from hsa.models.saved import load_seq2seq
from hsa.training.data.prepare import load_input_spec
from tests.tables import write_rows

TINY = ("--cpu", "--width", "8", "--heads", "2", "--epochs", "1", "--position-width", "8", "--vocabulary", "300")


def test_end_to_end(call, tmp_path):
    rows = [{"long": f"A cat. It has {i} lives. Really.", "short": f"{i} lives."} for i in range(30)]
    data, out = write_rows(tmp_path / "cats.csv", rows), tmp_path / "run"
    options = ("--task", "seq2seq", "--text", "long", "--label", "short", "--models", "hierarchical,multiscale")
    code, printed, err = call(
        "train", data, *options, *TINY, "--decoder-attention", "multiscale", "--out", out, columns=120
    )
    assert (code, err) == (0, "")
    assert "24 to train, 3 to validate, 3 to test" in printed
    rows = [line.split() for line in printed.splitlines()]
    assert ["encoder", "decoder", "parameters", "loss", "tokens", "exact", "answers/s", "train", "s"] in rows
    assert [row[1] for row in rows if row[:1] in (["hierarchical"], ["multiscale"]) and row[1] == "multiscale"]
    results = json.loads((out / "results.json").read_text())
    assert [result["model"] for result in results] == ["hierarchical", "multiscale"]
    assert "## Answers of multiscale" in (out / "report.md").read_text()
    model, spec = load_seq2seq(out / "hierarchical"), load_input_spec(out / "hierarchical")
    assert model.config.decoder.vocabulary == spec.tokenizer.get_vocab_size() + 2
    code, printed, err = call("predict", out / "hierarchical", data, "--json")
    assert (code, err) == (0, "")
    answers = [json.loads(line) for line in printed.splitlines()]
    assert [answer["where"] for answer in answers] == [f"{data}: row {i + 1} (line {i + 2})" for i in range(30)]
    assert all(isinstance(answer["label"], str) for answer in answers)
    assert call("predict", out / "hierarchical", data)[0] == 0
    again = call(
        "train", data, *options, *TINY, "--decoder-attention", "multiscale", "--out", out, "--resume", columns=120
    )
    assert again[0] == 0
    measured = {"answers_per_second": 0}  # tested again, at another speed
    assert [r | measured for r in json.loads((out / "results.json").read_text())] == [r | measured for r in results]
    other = call("train", data, *options, *TINY, "--decoder-attention", "flat", "--out", out, "--resume", columns=120)
    assert other[0] == 2
    assert "a checkpoint trained with" in other[2]


def test_wrong_options(fails, tmp_path):
    data = write_rows(tmp_path / "cats.csv", [{"long": "A cat.", "short": "Cat."}] * 12)
    assert "--text PROMPT --label ANSWER" in fails("train", data, "--task", "seq2seq", "--text", "long")
    assert "deepsets" in fails("train", "--task", "seq2seq", "--models", "deepsets")
    assert "several processes" in fails("train", "--task", "seq2seq", "--fsdp")

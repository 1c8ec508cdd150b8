import re

import pytest
from rich.console import Console

from hsa.analysis.tables import print_table, terminal_table

HEADER = ("model", "parameters", "accuracy", "train s", "on the frontier")
ROWS = (
    ("hierarchical", "1,234,567", "0.8500 ± 0.0500", "12.5", "training, test"),
    ("TF-IDF + logistic regression", "–", "0.9000", "0.5", "–"),
    ("flat", "1,234,567", "out of memory", "–", "–"),
)
OPTIONAL = ("none", "parameters", "train s")


def printed(width, optional=OPTIONAL):
    console = Console(width=width)
    with console.capture() as capture:
        print_table(console, terminal_table(HEADER, ROWS, "A caption", optional))
    assert console.width == width
    return capture.get()


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (38, ["parameters", "train s"]),
        (45, ["parameters"]),
        (56, ["parameters"]),
        (57, []),
        (80, []),
        (95, []),
        (200, []),
    ],
)
def test_tables_fit_and_numbers_are_whole(width, left_out):
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = set(re.split(r"\s+", text))
    assert {"hierarchical", "regression", "0.8500", "0.0500", "memory", "training,", "frontier"} <= words
    header, _, rest = text.partition("─")
    assert [name for name in HEADER if name.split()[0] not in header] == left_out
    assert ("1,234,567" in words) == ("parameters" not in left_out)
    assert " ".join(rest.split()).endswith(
        f"A caption; in the report: {', '.join(left_out)}" if left_out else "A caption"
    )


def test_wide_tables_are_not_folded():
    lines = printed(95).splitlines()
    assert lines[0].split() == " ".join(HEADER).split()
    assert lines[3].startswith("TF-IDF + logistic regression  ")
    assert len(lines) == 6


def test_tables_without_optional_columns_are_wider_than_the_console():
    assert "1,234,567" in printed(40, optional=())

"""Fixtures that run commands."""

import pytest

from hsa.cli.main import run


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command in this process and return its exit code, stdout and stderr."""

    def run_it(*arguments, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as caught:
            run([str(argument) for argument in arguments])
        return caught.value.code, *capsys.readouterr()

    return run_it


@pytest.fixture
def fails(call):
    """Run a command that fails and return its one line of error."""

    def run_it(*arguments):
        code, _, err = call(*arguments)
        assert (code, err.count("\n")) == (2, 1), err
        return err.rstrip("\n")

    return run_it


@pytest.fixture
def refuses(fails):
    """Run a command that fails; check the location that its error names, and phrases of the error in any order."""

    def run_it(arguments, where, *phrases):
        line = fails(*arguments)
        for phrase in (f"{where}: ", *phrases):
            assert phrase.lower() in line.lower(), line
        return line

    return run_it

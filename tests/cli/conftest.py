"""What tests of commands share."""

import pytest

from hsa.cli.main import run


@pytest.fixture
def call(capsys, monkeypatch):
    """Run the command in this process: exit code, stdout, stderr."""

    def run_it(*arguments, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as caught:
            run([str(argument) for argument in arguments])
        return caught.value.code, *capsys.readouterr()

    return run_it


@pytest.fixture
def fails(call):
    """The one line that a command says when it cannot do what it was asked for."""

    def run_it(*arguments):
        code, _, err = call(*arguments)
        assert (code, err.count("\n")) == (2, 1), err
        return err.rstrip("\n")

    return run_it

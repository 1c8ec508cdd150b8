"""Waiting of idle CPU threads: brief in the command line, unless the user chose otherwise or torch is loaded."""

import os
import subprocess
import sys

import pytest

from hsa.cli import threads


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in threads.OPTIONS:
        monkeypatch.setenv(name, "x")  # so that the variable is restored afterwards
        monkeypatch.delenv(name)


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr(threads, "sys", type("Sys", (), {"modules": {}}))


@pytest.mark.usefixtures("without_torch")
def test_threads_spin_briefly():
    threads.limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("name", threads.OPTIONS)
def test_a_choice_of_the_user_stays(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    threads.limit_spinning()
    assert {option: os.environ[option] for option in threads.OPTIONS if option in os.environ} == {name: "7"}


def test_no_effect_after_torch_is_loaded():
    threads.limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_the_command_line_decides_before_it_loads_torch():
    code = (
        "import os, sys, hsa.cli.main\n"
        "assert 'torch' not in sys.modules\n"
        "try: hsa.cli.main.run(['--version'])\n"
        "except SystemExit: print(os.environ['GOMP_SPINCOUNT'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines()[-1] == "1000"

"""A run has its folder for itself, finds a full disk before it starts, and ends politely."""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from hsa import running as module
from hsa.errors import HsaWarning, InvalidInput
from hsa.running import LOCK, Interrupted, claimed, defer_signals, running, sigterm_as_interrupt


def hold(folder, ready):
    with claimed(folder):
        ready.set()
        time.sleep(60)


@contextmanager
def other_process(folder):
    """Run a process that claims the folder, and kill it."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(folder, ready))
    process.start()
    try:
        assert ready.wait(60)
        yield process
    finally:
        process.kill()
        process.join()


def test_the_second_process_is_refused_until_the_first_dies(tmp_path):
    with other_process(tmp_path) as process:
        message = (
            rf"{tmp_path}: expected a folder that no other process uses, got a folder that process {process.pid} on .*"
        )
        with pytest.raises(InvalidInput, match=message), claimed(tmp_path):
            pass
    assert (tmp_path / LOCK).exists()  # it was killed
    with claimed(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_claim_can_be_repeated_in_the_same_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with claimed(tmp_path / "run"), claimed(module.Path("run")), claimed(tmp_path / "run" / "model"):
        assert (tmp_path / "run" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_of_a_distributed_run_share_the_claim(tmp_path, monkeypatch):
    with other_process(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with claimed(tmp_path):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(InvalidInput, match="no other process"), claimed(tmp_path):
            pass


def test_temporary_files_of_killed_runs_are_removed(tmp_path):
    (tmp_path / ".model.pt.123.part").write_bytes(b"half")
    (tmp_path / ".files.123.part").mkdir()
    (tmp_path / ".files.123.part" / "config.json").write_text("{")
    (tmp_path / "model.pt").write_bytes(b"whole")
    with claimed(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "model.pt"]


def test_a_folder_that_stays_empty_is_removed(tmp_path):
    with claimed(tmp_path / "runs" / "a") as folder:
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
    with claimed(tmp_path / "runs" / "a") as folder:
        (folder / "result").touch()
    assert sorted(path.name for path in (tmp_path / "runs" / "a").iterdir()) == ["result"]


def test_platforms_and_disks_without_locks(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fcntl", None)
        with (
            pytest.warns(HsaWarning, match="cannot be locked .*fcntl.*no other process writes to it"),
            claimed(tmp_path),
        ):
            pass

    def refuse(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(HsaWarning, match="cannot be locked .*No locks available"), claimed(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/proc/none", "/proc/self/none"])
def test_folders_that_cannot_be_written(folder):
    with (
        pytest.raises(InvalidInput, match=f"{folder}: cannot be written .*pass another folder"),
        claimed(module.Path(folder)),
    ):
        pass


def test_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(InvalidInput, match=f"{path}: cannot be written"), claimed(path):
            pass


def test_a_folder_of_others(tmp_path, monkeypatch):
    def refuse(path, *arguments):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InvalidInput, match=r"cannot be written \(.*Permission denied"), claimed(tmp_path):
        pass


def test_a_quota_is_found_before_the_run(tmp_path):
    model = torch.nn.Linear(100, 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with running(tmp_path / "checkpoint.pt", model):
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with (
            pytest.raises(InvalidInput, match=r"cannot be written .*File too large"),
            running(tmp_path / "checkpoint.pt", model),
        ):
            raise AssertionError("the run began")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_found_before_the_run(tmp_path, monkeypatch):
    disk = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=300_000))
    model = torch.nn.Linear(100, 100)  # about 40 kB of weights, 160 kB of state; old and new state together do not fit
    with (
        pytest.raises(InvalidInput, match="expected a writable folder with space for"),
        running(tmp_path / "new.pt", model),
    ):
        raise AssertionError("the run began")
    (tmp_path / "old.pt").touch()
    with running(tmp_path / "old.pt", model):
        pass


def test_disks_that_cannot_reserve_space(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with claimed(tmp_path, 2**25):
        pass
    monkeypatch.delattr(os, "posix_fallocate")
    with claimed(tmp_path, 2**25):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_deferred_once(number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with defer_signals() as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_handlers_of_the_user_stay():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with defer_signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not stop()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_a_signal_after_the_last_step_is_not_lost():
    with pytest.raises(Interrupted, match="continue with --resume"), running(None, None):
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_as_interrupt():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_sigterm_handler_of_the_user_stays():
    arrived = []
    before = signal.signal(signal.SIGTERM, lambda *_: arrived.append(1))
    try:
        with sigterm_as_interrupt():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert arrived == [1]

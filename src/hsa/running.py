"""Protection of a run: one process per folder, space for its checkpoints, signals that wait for the current step."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hsa.errors import HsaError, HsaWarning, InvalidInput

LOCK = ".lock"
_PROBED = 2**30  # most bytes that are allocated to find a quota; the free space of the disk is checked for all
_held: set[Path] = set()


class Interrupted(HsaError):
    """A run that Ctrl-C or SIGTERM stopped; a checkpoint was saved."""


@contextmanager
def running(checkpoint: Path | None, model: Any) -> Iterator[Callable[[], bool]]:
    """Claim the folder of a run that writes checkpoints of a model, and defer SIGINT and SIGTERM.

    Yields a function that returns whether a signal has arrived: the run then saves a checkpoint and raises
    `Interrupted`. A second signal interrupts at once.

    Args:
        checkpoint: Path of the checkpoint; None for a run that writes none.
        model: Module to train.

    Raises:
        InvalidInput: Another process uses the folder, or checkpoints do not fit on the disk.
        Interrupted: A signal arrived after the last step, so the block could not raise it.
    """
    with ExitStack() as stack:
        if checkpoint is not None:
            weights = sum(parameter.nbytes for parameter in model.parameters())
            size = 4 * weights  # current and best weights, and the two means of Adam
            copies = 1 if checkpoint.exists() else 2  # the new one is complete before it replaces the old one
            stack.enter_context(claimed(checkpoint.parent, size, copies))
        stop = stack.enter_context(defer_signals())
        yield stop
        if stop():
            raise Interrupted("stopped at the end of training; continue with --resume")


@contextmanager
def defer_signals() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C and SIGTERM so that the current step can finish; a second signal interrupts at once.

    Yields a function that returns whether a signal has arrived. A SIGTERM handler of the user's own stays in place.
    """
    arrived = False

    def handle(number: int, frame: Any) -> None:
        nonlocal arrived
        if arrived:
            raise KeyboardInterrupt
        arrived = True

    before: dict[int, Any] = {}
    try:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, handle)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            before[signal.SIGTERM] = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not the main thread: leave signals alone
        yield lambda: False
        return
    try:
        yield lambda: arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, as on Ctrl-C. A handler of the user's own stays in place."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def claimed(folder: Path, size: int = 2**20, copies: int = 1) -> Iterator[Path]:
    """Keep other processes out of a folder, remove temporary files of killed runs, and check that new files will fit.

    Yields the folder. The system releases the claim when the process dies. The first process of a distributed run claims
    it for all. A folder that stays empty is removed.

    Args:
        folder: Folder to claim; created if it does not exist.
        size: Bytes of a file that will be written.
        copies: Number of such files at a time.

    Raises:
        InvalidInput: Another process has claimed the folder, or it is not writable, or there is not enough space.
    """
    if not _is_first_process():
        yield folder
        return
    with ExitStack() as stack:
        try:
            stack.callback(_remove_empty, [path for path in (folder, *folder.parents) if not path.exists()])
            folder.mkdir(parents=True, exist_ok=True)
            if folder.resolve() not in _held:
                stack.enter_context(_locked(folder))
                _remove_stale(folder)
            _check_space(folder, size, copies)
        except OSError as error:
            raise InvalidInput(
                str(folder),
                problem=f"cannot be written ({error})",
                expected=f"a writable folder with space for {max(1, copies * size // 2**20):,} MiB",
                fix="Free some space, or pass another folder",
            ) from error
        yield folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder by a file in it, which the system unlocks when the process dies."""
    file = _open_lock(folder)
    key = folder.resolve()
    _held.add(key)
    try:
        yield
    finally:
        _held.discard(key)
        if file is not None:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(file)


def _open_lock(folder: Path) -> int | None:
    """Return the descriptor of the locked file; None, with a warning, where files cannot be locked."""
    try:
        import fcntl
    except ImportError:  # Windows
        _warn_unlocked(folder, "this platform has no fcntl")
        return None
    path = folder / LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder removes the file before it unlocks it, so this one may be gone: then open the next one.
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                os.truncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except OSError as error:
            holder = os.read(file, 200).decode(errors="replace") or "another process"
            os.close(file)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise InvalidInput(
                    str(folder),
                    got=f"a folder that {holder} is writing to",
                    expected="a folder that no other process uses",
                    fix="Wait until that run ends, stop it, or pass another folder",
                ) from None
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                _warn_unlocked(folder, str(error))
                return None
            raise
        os.close(file)


def _warn_unlocked(folder: Path, reason: str) -> None:
    warnings.warn(
        f"{folder}: cannot be locked ({reason}); make sure that no other process writes to it", HsaWarning, stacklevel=2
    )


def _remove_stale(folder: Path) -> None:
    """Remove the temporary files of killed runs: the claim ensures that no other process is writing them."""
    for path in folder.glob(".*.part"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, from the innermost, up to the first with content."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _check_space(folder: Path, size: int, copies: int) -> None:
    """Raise OSError unless files of these sizes fit: allocate them, because a quota shows in no other way."""
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < size * copies:
        raise OSError(errno.ENOSPC, f"{disk.free / 2**20:,.0f} MiB are free")
    probes = [folder / f".space.{os.getpid()}.{number}.part" for number in range(copies)]
    try:
        for probe in probes:
            _allocate(probe, max(1, min(size, _PROBED)))
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)


def _allocate(path: Path, size: int) -> None:
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except (AttributeError, OSError) as error:  # not on macOS, nor on every file system
            if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            for begin in range(0, size, 2**24):
                file.write(bytes(min(2**24, size - begin)))
        file.flush()
        os.fsync(file.fileno())


def _is_first_process() -> bool:
    """Return whether this is the first or only process of a run; launchers set RANK."""
    return os.environ.get("RANK", "0") == "0"

"""Reading and writing of files. Writes are atomic: to a temporary file in the same folder, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.checksums import SUMS, append_checksum, check_appended, digest_of, format_sums, read_sums
from hsa.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from torch import Tensor  # reading a recipe must not import torch


def write_then_rename(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: call `write` with a temporary path, then rename that file to `path`.

    Raises:
        InvalidInput: The disk is full or the folder is not writable; an existing file at `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        _finish(temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when a write fails
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):  # the folder may not exist
            temporary.unlink(missing_ok=True)


def write_together(folder: Path, write: Callable[[Path], object], *, last: str) -> None:
    """Write files that belong together: call `write` with a temporary folder, then rename its files into `folder`.

    No file is replaced before all are complete. The file named `last` is renamed last: it marks the set as complete.

    Raises:
        InvalidInput: The disk is full or the folder is not writable; existing files are unchanged.
    """
    temporary = folder / f".files.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.mkdir(exist_ok=True)
        write(temporary)
        files = sorted((file for file in temporary.rglob("*") if file.is_file()), key=lambda file: file.name == last)
        for file in files:
            _finish(file)
        for file in files:
            target = folder / file.relative_to(temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
    except InvalidInput as error:
        raise error.moved(error.where.replace(str(temporary), str(folder)), fix="No file was replaced") from error
    except (OSError, RuntimeError) as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_sealed(folder: Path, write: Callable[[Path], object]) -> None:
    """Write files that belong together, and list them in the `SHA256SUMS` of the folder, for `check_listed`.

    Args:
        folder: Folder of the files.
        write: Function that writes the files into the temporary folder that it is called with.
    """

    def write_all(temporary: Path) -> None:
        write(temporary)
        sums = {file.name: digest_of(file) for file in temporary.iterdir()}
        with contextlib.suppress(InvalidInput):  # no list yet, or a damaged one
            sums = {name: digest for name, digest in read_sums(folder).items() if (folder / name).is_file()} | sums
        write_text(temporary / SUMS, format_sums(sums))

    write_together(folder, write_all, last=SUMS)


def _finish(path: Path) -> None:
    """Flush a file to disk and give it the permissions of a new file: safetensors allows its owner alone to read it."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    path.chmod(0o666 & ~_umask())


def _unwritable(path: Path, error: Exception) -> InvalidInput:
    return InvalidInput(
        str(path),
        problem=f"cannot be written ({error})",
        expected="a writable folder on a disk with free space",
        fix="The existing file is unchanged" if path.is_file() else "No file was written",
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    write_then_rename(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, expected: str) -> Any:
    """Return the content of a JSON file; `expected` describes it in errors."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(str(path), problem="no such file", expected=expected) from None
    except (OSError, ValueError, RecursionError) as error:  # nested too deeply
        raise InvalidInput(str(path), got=f"a file that cannot be read ({error})", expected=expected) from None


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the options in a YAML file.

    Raises:
        InvalidInput: The file is missing, is not YAML, or holds something other than names with values.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("pyyaml", "train", "reading recipes") from None
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(path), problem=error.strerror or str(error), expected="a recipe") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:  # nested too deeply
        raise InvalidInput(
            str(path), problem=f"not valid YAML ({' '.join(str(error).split())})", expected="a recipe"
        ) from None
    if not isinstance(options, dict):
        content = "an empty file" if options is None else f"a {type(options).__name__}"
        raise InvalidInput(str(path), got=content, expected="names and values of options")
    return options


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    safetensors = _safetensors()
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        try:
            safetensors.save_file(on_host, str(temporary), dict(metadata or {}))
        except safetensors.SafetensorError as error:  # raised when the disk is full
            raise OSError(str(error)) from error

    write_then_rename(path, write)


def load_tensors(path: Path, expected: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file; `expected` describes it in errors."""
    safetensors = _safetensors()
    if not path.is_file():
        raise InvalidInput(str(path), problem="no such file", expected=expected)
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise InvalidInput(str(path), got=f"a damaged file ({error})", expected=expected) from None


def save_state(path: Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain values with `torch.save`, atomically, with a checksum at the end of the file."""
    import torch

    def write(temporary: Path) -> None:
        try:
            with temporary.open("wb") as file:
                torch.save(content, file)
        except RuntimeError as error:  # torch also fails to close the archive; the first error is the cause
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        append_checksum(temporary)

    write_then_rename(path, write)


def load_state(path: Path, expected: str, fix: str) -> dict[str, Any]:
    """Load what `save_state` wrote, on the CPU. Only tensors and plain values are unpickled: a file cannot run code.

    Args:
        path: File to load.
        expected: Description of the file, for errors.
        fix: Advice to the user about a damaged file.

    Raises:
        InvalidInput: The file is missing or damaged.
    """
    import torch

    if not path.is_file():
        raise InvalidInput(str(path), problem="no such file", expected=expected)
    check_appended(path, expected, fix)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        got = f"a damaged file ({type(error).__name__})"
        raise InvalidInput(str(path), got=got, expected=expected, fix=fix) from error
    if not isinstance(content, dict):
        raise InvalidInput(str(path), got="another kind of file", expected=expected, fix=fix)
    return content


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise MissingExtra("safetensors", "train", "saving and loading models") from None

    class _Both:
        save_file = staticmethod(safetensors.torch.save_file)
        safe_open = safetensors.safe_open
        SafetensorError = safetensors.SafetensorError

    return _Both

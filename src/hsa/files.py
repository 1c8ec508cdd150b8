"""Reading and writing of files. Writes are atomic: to a temporary file in the same folder, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # safetensors creates files that only their owner may read
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when a write fails
        raise InvalidInput(
            str(path),
            problem=f"cannot be written ({error})",
            expected="a writable folder on a disk with free space",
            fix="The existing file is unchanged" if path.exists() else "No file was written",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the folder may not exist
            temporary.unlink(missing_ok=True)


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
    except (OSError, ValueError) as error:
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
    except (yaml.YAMLError, UnicodeDecodeError) as error:
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

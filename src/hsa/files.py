"""Files that are never half written: write beside, flush to the disk, rename."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from torch import Tensor  # recipes are read without torch


def write_then_rename(path: Path, write: Callable[[Path], object]) -> None:
    """What `write` writes takes the place of `path` only when it is complete.

    Raises:
        InvalidInput: the disk is full or the folder cannot be written to; what was at `path` is still there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(beside)
        with beside.open("r+b") as file:
            os.fsync(file.fileno())
        beside.chmod(0o666 & ~_umask())  # safetensors makes files that only their owner may read
        beside.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError when a write fails
        kept = "the file that was there is unharmed" if path.exists() else "nothing was there before"
        raise InvalidInput(
            str(path), given=f"a file that cannot be written ({error})", expected="room to write", fix=kept
        ) from error
    finally:
        with contextlib.suppress(OSError):  # a folder that is none has nothing in it to remove
            beside.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    write_then_rename(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(str(path), given="no such file", expected=what) from None
    except (OSError, ValueError) as error:
        raise InvalidInput(str(path), given=f"a file that cannot be read ({error})", expected=what) from None


def load_yaml(path: Path) -> dict[str, Any]:
    """Read the names and values of a YAML file.

    Raises:
        InvalidInput: naming the file: not there, no YAML, no names.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("pyyaml", "train", "reading recipes") from None
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(path), given=error.strerror or error, expected="a recipe") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(str(path), given=f"no YAML ({' '.join(str(error).split())})", expected="a recipe") from None
    if not isinstance(given, dict):
        raise InvalidInput(str(path), given=f"a {type(given).__name__}", expected="names and values of options")
    return given


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    safetensors = _safetensors()
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(beside: Path) -> None:
        try:
            safetensors.save_file(whole, str(beside), dict(metadata or {}))
        except safetensors.SafetensorError as error:  # its name for a full disk
            raise OSError(str(error)) from error

    write_then_rename(path, write)


def load_tensors(path: Path, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file, and its metadata."""
    safetensors = _safetensors()
    if not path.is_file():
        raise InvalidInput(str(path), given="no such file", expected=what)
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise InvalidInput(str(path), given=f"a damaged file ({error})", expected=what) from None


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

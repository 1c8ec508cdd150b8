"""Reading and writing of files. Writes are atomic: to a temporary file in the same folder, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.checksums import SUMS, append_checksum, check_appended, digest_of, format_sums, read_sums
from hsa.errors import InvalidInput, MissingExtra

if TYPE_CHECKING:
    from torch import Tensor  # reading a recipe must not import torch

MAX_LEVELS = 200
"""Most levels of a JSON document. Code that follows its nesting may recurse."""
MAX_UNPACKED = 2 << 30
"""Most bytes of a compressed file after decompression, because a file of a few megabytes can hold terabytes of zeros."""
MAX_RECIPE_BYTES = 256 << 10
MAX_RECIPE_VALUES = 10_000
"""Most values of a recipe, counting those of an anchor again for each of its aliases."""
_MAX_RECIPE_LEVELS = 20
_CHUNK = 1 << 20


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


def cache_folder() -> Path:
    """Return the folder of cached data: $HSA_CACHE, or hsa in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HSA_CACHE") or Path(base) / "hsa")


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
        return parse_json(path.read_text(encoding="utf-8"), path.name)
    except FileNotFoundError:
        raise InvalidInput(str(path), problem="no such file", expected=expected) from None
    except InvalidInput as error:
        reason: object = f"{error.where}: {error.problem or error.got}"
    except (OSError, ValueError) as error:
        reason = error
    raise InvalidInput(str(path), got=f"a file that cannot be read ({reason})", expected=expected)


def parse_json(text: str, where: str, line: int = 1) -> Any:
    """Parse a JSON text that begins at line `line` of its file.

    Raises:
        InvalidInput: For invalid JSON, with line and column; a key that an object has twice; more than `MAX_LEVELS` levels.

    >>> parse_json('{"a": 1, "a": 2}', "a.json")
    Traceback (most recent call last):
    hsa.errors.InvalidInput: a.json: line 1: expected distinct keys, got the key 'a' twice in an object. Rename one of them
    """
    too_deep = InvalidInput(
        where, got="JSON nested too deeply to read", expected=f"at most {MAX_LEVELS} levels", fix="Flatten it"
    )
    try:
        document = json.loads(text, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        location = f"{where}: line {line + error.lineno - 1}, column {error.colno}"
        raise InvalidInput(location, problem=f"invalid JSON ({error.msg})", expected="JSON") from None
    except RecursionError:
        raise too_deep from None
    except InvalidInput as error:
        raise error.moved(f"{where}: line {line}" if "\n" not in text else where) from None
    except ValueError:  # an integer of thousands of digits
        raise InvalidInput(f"{where}: line {line}", got="a number too long to read", expected="JSON") from None
    if text.count("[") + text.count("{") > MAX_LEVELS and _is_deep(document):
        raise too_deep
    return document


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object; Python's parser would drop all but the last of equal keys."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidInput(
            "json", got=f"the key {twice!r} twice in an object", expected="distinct keys", fix="Rename one of them"
        )
    return members


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MAX_LEVELS + 1):
        containers = [value for value in level if isinstance(value, (dict, list))]
        level = [part for value in containers for part in (value.values() if isinstance(value, dict) else value)]
        if not containers:
            return False
    return True


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the options in a YAML file.

    Raises:
        InvalidInput: The file is missing, is not YAML, is too large, or holds something other than names with values.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("pyyaml", "train", "reading recipes") from None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
        if len(data) > MAX_RECIPE_BYTES:
            raise InvalidInput(
                str(path), got="a larger file", expected=f"a recipe of at most {MAX_RECIPE_BYTES:,} bytes"
            )
        options = yaml.load(data.decode(), Loader=_recipe_loader())
    except OSError as error:
        raise InvalidInput(str(path), problem=error.strerror or str(error), expected="a recipe") from None
    except InvalidInput as error:
        raise error.moved(str(path)) from None
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # UTF-8, dates, long integers, deep nesting
        raise InvalidInput(
            str(path), problem=f"not valid YAML ({' '.join(str(error).split())})", expected="a recipe"
        ) from None
    if not isinstance(options, dict):
        content = "an empty file" if options is None else f"a {type(options).__name__}"
        raise InvalidInput(str(path), got=content, expected="names and values of options")
    return options


@cache
def _recipe_loader() -> Any:
    """Return PyYAML's safe loader with limits on nesting and aliases, and without repeated names."""
    import yaml

    class Loader(yaml.SafeLoader):
        def __init__(self, stream: Any):
            super().__init__(stream)
            self.level = 0
            self.sizes: dict[Any, int] = {}  # number of values of each node, aliases included

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            line = event.start_mark.line + 1
            self.level += 1
            if self.level > _MAX_RECIPE_LEVELS:
                expected = f"at most {_MAX_RECIPE_LEVELS} levels"
                raise InvalidInput("yaml", got=f"values nested too deeply (line {line})", expected=expected)
            node = super().compose_node(parent, index)
            self.level -= 1
            if node not in self.sizes:
                if isinstance(event, yaml.AliasEvent):
                    got = f"the alias *{event.anchor} inside its own anchor (line {line})"
                    raise InvalidInput("yaml", got=got, expected="aliases of other values")
                self.sizes[node] = self._size(node)
                if self.sizes[node] > MAX_RECIPE_VALUES:
                    got = f"more, with those that aliases repeat (line {line})"
                    raise InvalidInput("yaml", got=got, expected=f"at most {MAX_RECIPE_VALUES:,} values")
            return node

        def _size(self, node: Any) -> int:
            if isinstance(node, yaml.ScalarNode):
                return 1
            if isinstance(node, yaml.SequenceNode):
                return 1 + sum(self.sizes[part] for part in node.value)
            names = Counter((name.tag, name.value) for name, _ in node.value if isinstance(name, yaml.ScalarNode))
            for (_, name), count in names.most_common(1):
                if count > 1:  # PyYAML would drop all but the last
                    got = f"{name!r} {count} times, from line {node.start_mark.line + 1} on"
                    raise InvalidInput("yaml", got=got, expected="each name once", fix="Remove all but one")
            return 1 + sum(self.sizes[name] + self.sizes[value] for name, value in node.value)

    return Loader


def unpack_gzip(data: bytes, where: str) -> bytes:
    """Decompress gzip data of at most `MAX_UNPACKED` bytes.

    Raises:
        InvalidInput: For damaged data, or more bytes.
    """
    parts: list[bytes] = []
    size = 0
    try:
        with gzip.GzipFile(fileobj=BytesIO(data)) as file:
            for part in iter(partial(file.read, _CHUNK), b""):
                size += len(part)
                check_unpacked(size, where)
                parts.append(part)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInput(where, got=f"damaged data ({error})", expected="a gzip file") from None
    return b"".join(parts)


def check_unpacked(size: int, where: str) -> None:
    """Raise if decompressed data have more than `MAX_UNPACKED` bytes."""
    if size > MAX_UNPACKED:
        raise InvalidInput(
            where,
            got="more data",
            expected=f"at most {MAX_UNPACKED:,} bytes after decompression",
            fix="Split the file, or decompress it yourself if you trust it",
        )


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether the path is a file in the folder or below it, after following symbolic links."""
    return os.path.isfile(path) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def file_inside(folder: Path, name: str, where: str, *, expected: str, fix: str | None = None) -> Path:
    """Return the path of a file that data name relative to their folder, or by an absolute path into it.

    Raises:
        InvalidInput: The file is missing, or lies outside the folder: data from elsewhere must not name private files.
    """
    path = folder / name
    if is_inside(path, folder):
        return path
    if os.path.isfile(path):
        fix = "It lies elsewhere: copy the file, not a link to it, into the folder and name it relative to the folder"
    raise InvalidInput(where, problem="no such file in the folder", expected=expected, fix=fix)


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

"""`hsa info`: print versions, devices, installed extras and the backends that run here."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import TYPE_CHECKING, Any

import hsa
from hsa.cli.help import HelpPage
from hsa.errors import Unsupported

if TYPE_CHECKING:
    from hsa.attention.dispatch import Backend


HELP = HelpPage(examples={"hsa info": "include its output when you report a problem"})


def info() -> None:
    """Show versions, devices, installed extras and usable backends.

    Tries every backend of each operator on a small tree on every device.
    """
    import torch
    from rich.console import Console
    from rich.text import Text

    console = Console()
    sections: dict[str, list[tuple[str, str]]] = {
        "Versions": [("hsa", version("hsa")), ("torch", torch.__version__), ("Python", platform.python_version())],
        "Devices": _devices(),
        "Extras": _extras(),
        "Backends": _backends(),
    }
    for title, rows in sections.items():
        console.print(Text(title, style="bold"))
        for name, value in rows:
            console.print(Text(f"  {name:<24}{value}"), soft_wrap=True)


def _devices() -> list[tuple[str, str]]:
    import torch

    devices = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads")]
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        devices.append((f"cuda:{i}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB"))
    if torch.backends.mps.is_available():
        devices.append(("mps", "Apple GPU"))
    return devices


def _extras() -> list[tuple[str, str]]:
    """Return each extra with the versions of its packages, according to the metadata of the installed hsa."""
    about = metadata("hsa")
    rows = []
    for extra in about.get_all("Provides-Extra") or []:
        packages = [
            match.group(1)
            for line in about.get_all("Requires-Dist") or []
            if (match := re.match(rf"""([\w.-]+)[^;\[]*;.*extra == ["']{extra}["']""", line))
        ]
        if not packages:  # the extra only names other extras
            continue
        missing = [package for package in packages if _version(package) is None]
        present = ", ".join(f"{package} {_version(package)}" for package in packages if package not in missing)
        advice = f"missing: {', '.join(missing)} (pip install 'hsa[{extra}]')"
        rows.append((extra, "; ".join(filter(None, [present, advice if missing else ""]))))
    return rows


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backends() -> list[tuple[str, str]]:
    """Return the backends of each operator with their devices, then each reason why some run on none, once."""
    import torch

    from hsa.attention.clustered.operator import ATTEND
    from hsa.attention.hierarchical.operator import ENERGY, HIERARCHICAL
    from hsa.attention.multiscale.operator import MULTISCALE

    tables: list[tuple[Any, tuple[Backend, ...]]] = [
        (hsa.hierarchical_attention, HIERARCHICAL),
        (hsa.multiscale_attention, MULTISCALE),
        (hsa.clustered_attention, ATTEND),
        (hsa.energy, ENERGY),
    ]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows, refusals = [], dict[str, None]()
    for operator, backends in tables:
        words = []
        for backend in backends:
            runs, refused = _try_devices(operator, backend, devices)
            words.append(f"{backend.name} ({', '.join(runs) or 'unavailable'})")
            refusals |= {} if runs else dict.fromkeys(refused)
        rows.append((operator.__name__, "; ".join(words)))
    return rows + [("unavailable", reason) for reason in refusals]


def _try_devices(operator: Any, backend: Backend, devices: list[str]) -> tuple[list[str], list[str]]:
    """Return the devices on which a backend runs, and why it does not run on the others."""
    import torch

    runs, refused = [], []
    for device in devices:
        tree = hsa.Hierarchy.from_nested([[2, 3]]).to(device)
        q = torch.zeros(tree.num_leaves, 1, 16, device=device)
        operands = (q, q) if operator is hsa.energy else (q, q, q)
        structure = [tree.num_leaves] if operator is hsa.clustered_attention else tree
        try:
            operator(*operands, structure, backend=backend.name)
            runs.append(device)
        except Unsupported as error:
            refused.append(str(error).splitlines()[-1].strip())
    return runs, refused

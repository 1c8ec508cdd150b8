"""Waiting of CPU threads between parallel loops: passive, so that they do not take the cores from other programs."""

from __future__ import annotations

import os
import sys

OPTIONS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables of OpenMP runtimes that say how threads wait."""


def wait_passively() -> None:
    """Let idle threads sleep instead of spin, unless the user chose otherwise.

    OpenMP runtimes read the variable when they are loaded, with torch, so this has no effect afterwards.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in OPTIONS):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

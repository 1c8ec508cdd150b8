"""Waiting of CPU threads between parallel loops: briefly, so that they do not keep the cores from other programs."""

from __future__ import annotations

import os
import sys

OPTIONS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
"""Environment variables of OpenMP runtimes that say how threads wait."""
SPINS = 1000
"""Number of spins of an idle thread before it sleeps. Enough for the short loops of small models on a quiet machine."""


def limit_spinning() -> None:
    """Let idle threads sleep after a few spins, unless the user chose otherwise.

    OpenMP runtimes read the variable when they are loaded, with torch, so this has no effect afterwards.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in OPTIONS):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)

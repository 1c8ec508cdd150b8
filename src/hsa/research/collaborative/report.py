"""Report on shared projections: parameters and errors, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from hsa.research.collaborative.heads import SharedProjections


@dataclass(frozen=True)
class CollaborativeLayer:
    """Parameters and errors of one layer, as in `SharedProjections`."""

    number: int
    parameters_before: int
    parameters_after: int
    error: float
    logit_error: float | None


@dataclass(frozen=True)
class CollaborationReport:
    """Result of `collaborate`; `print` shows it as a table.

    Attributes:
        shared_dim: Number of channels that the heads of a layer share.
        channels: Number of channels of all heads before.
        layers: Parameters of query and key projections (with the mixing) and errors, per layer.
        model_parameters_before, model_parameters_after: Number of parameters of the whole model.
    """

    shared_dim: int
    channels: int
    layers: tuple[CollaborativeLayer, ...]
    model_parameters_before: int
    model_parameters_after: int

    @property
    def saved(self) -> int:
        """Number of parameters saved; negative if the mixing adds more than sharing saves."""
        return self.model_parameters_before - self.model_parameters_after

    @staticmethod
    def of(layers: Iterable[SharedProjections], channels: int, before: int, after: int) -> CollaborationReport:
        """Build the report from the new projections and the number of parameters of the model before and after."""
        layers = list(layers)
        costs = (
            CollaborativeLayer(number, x.parameters_before, x.parameters_after, x.error, x.logit_error)
            for number, x in enumerate(layers)
        )
        return CollaborationReport(layers[0].shared_dim, channels, tuple(costs), before, after)

    def __str__(self) -> str:
        rows = [["layer", "q/k before", "q/k after", "error", "logit error"]]
        for layer in self.layers:
            rows.append([str(layer.number), *_row(layer.parameters_before, layer.parameters_after, layer.error)])
            rows[-1].append("–" if layer.logit_error is None else f"{layer.logit_error:.2e}")
        before, after = (
            sum(getattr(layer, name) for layer in self.layers) for name in ("parameters_before", "parameters_after")
        )
        rows.append(["all", *_row(before, after), "", ""])
        rows.append(["model", *_row(self.model_parameters_before, self.model_parameters_after), "", ""])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        share = self.saved / self.model_parameters_before
        return "\n".join(
            [
                f"{self.shared_dim} shared channels in place of {self.channels}",
                *lines,
                f"saved: {self.saved:,} ({share:.1%})",
            ]
        )


def all_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _row(before: int, after: int, *errors: float) -> list[str]:
    return [f"{before:,}", f"{after:,}", *(f"{error:.2e}" for error in errors)]

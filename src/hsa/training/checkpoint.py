"""Checkpoints: the complete state of a run, so that it resumes as if it had never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from hsa.errors import HsaWarning, InvalidInput
from hsa.files import load_state, save_state
from hsa.models.saved import check_fits
from hsa.plain_values import check_fields, from_plain

T = TypeVar("T")

FORMAT = 2
"""Version of the checkpoint format; other versions cannot be resumed. hsa 0.1 wrote version 1."""


def full_weights(model: nn.Module) -> dict[str, Any]:
    """Return all weights on the CPU, whether the model is plain, replicated or sharded over processes."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def set_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Load weights returned by `full_weights`. With several processes, only the first one has them."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves it unsharded in every process
    own = dict(weights) if not several or torch.distributed.get_rank() == 0 else {}
    set_model_state_dict(model, own, options=options)


def gather(model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint. All processes must call this; the main process saves the content."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "format": FORMAT,
        "model": full_weights(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "random": {"cpu": torch.get_rng_state(), "cuda": [torch.cuda.get_rng_state(i) for i in devices]},
        "progress": progress,
    }


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint to a temporary file, then rename it: the previous checkpoint survives a full disk."""
    save_state(path, content)


def load(path: Path) -> dict[str, Any]:
    """Load the content of a checkpoint, after its checksum is verified.

    Raises:
        InvalidInput: The file is missing, damaged, or not a checkpoint of this version of hsa.
    """
    if not path.is_file():
        raise InvalidInput(
            str(path),
            problem="no such file",
            expected="a checkpoint",
            fix="There is nothing to resume; start without --resume",
        )
    fix = "Delete it to train this model from the start"
    content = load_state(path, "a checkpoint of hsa", fix)
    version = content.get("format")
    if version != FORMAT:
        raise InvalidInput(
            str(path),
            got={1: "a checkpoint of hsa 0.1"}.get(version, f"format {version}")
            if isinstance(version, int)
            else "another kind of file",
            expected=f"a checkpoint of hsa, format {FORMAT}",
            fix=fix,
        )
    check_fields(content, ("model", "optimizer", "random", "progress"), str(path))
    return content


def resume(
    path: Path,
    training: dict[str, Any],
    kind: type[T],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    growing: Collection[str] = (),
) -> tuple[T, dict[str, Any]]:
    """Load a checkpoint to continue a run.

    Args:
        path: Path of the checkpoint.
        training: Options and digests of the data that must equal those of the checkpoint.
        kind: Dataclass of the state of the run.
        model, optimizer: Model and optimizer to restore.
        growing: Options that may be larger than those of the checkpoint.

    Returns:
        The state of the run, and the whole progress that was saved.

    Raises:
        InvalidInput: The checkpoint is missing, damaged, or of a run with another model, other options or other data.
    """
    content = load(path)
    progress = content["progress"]
    check_fields(progress, ("state", "training"), f"{path}: progress")
    check_fields(progress["training"], (), f"{path}: progress: training")
    check_same(path, progress["training"], training, growing)
    state = from_plain(kind, progress["state"], f"{path}: progress: state")
    if progress.get("best_weights") is not None:
        check_fits(str(path), progress["best_weights"], _own_weights(model))
    return state, restore(path, content, model, optimizer)


def restore(path: Path, content: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load a checkpoint into a model, its optimizer and the random generators; return the progress.

    Raises:
        InvalidInput: The checkpoint is of another model; the message names the first tensor that does not fit.
    """
    check_fits(str(path), content["model"], _own_weights(model))
    set_weights(model, content["model"])
    try:
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)
        torch.set_rng_state(content["random"]["cpu"])
        for i, state in enumerate(content["random"]["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, i)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(
            str(path),
            got=f"another state of the optimizer or of the random generators ({type(error).__name__}: {error})",
            expected="a checkpoint of this model and version of hsa",
            fix="Delete it to train this model from the start",
        ) from error
    return content["progress"]


def _own_weights(model: nn.Module) -> dict[str, Any]:
    """Return the weights by name, for their shapes: `full_weights` is empty on all processes but the first."""
    return {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}


def warn_longer(run: Path, was: int, now: int, unit: str, rate: float, ended: str | None = None) -> None:
    """Warn that a run goes on for longer than it was started for, which changes its learning rates.

    Args:
        run: Folder of the run.
        was, now: Total length as it was started, and as it is now.
        unit: Unit of the length, such as "epochs".
        rate: Learning rate of the next step.
        ended: Option that ended the run early, after which it does not go on; None if it goes on.
    """
    text = f"ended before its {was:,} {unit} because of {ended}, so that more {unit} do not continue it"
    if ended is None:
        text = (
            f"continues to {now:,} {unit} instead of {was:,}. From here the learning rate follows the schedule of {now:,} "
            f"{unit} ({rate:.2g} now), so the result differs from {now:,} {unit} in one run"
        )
    warnings.warn(f"{run}: {text}", HsaWarning, stacklevel=2)


def check_same(path: Path, was: dict[str, Any], now: dict[str, Any], growing: Collection[str] = ()) -> None:
    """Raise an error if a checkpoint was trained with other options or data than the run that resumes it.

    Options in `growing` may be larger now.
    """
    for name in (*now, *was):
        may_grow = name in growing and isinstance(was.get(name), int)
        if was.get(name) == now.get(name) or (may_grow and was[name] < now[name]):
            continue
        expected, got = f"{name} = {now.get(name)}", f"a checkpoint trained with {name} = {was.get(name)}"
        if name == "data":  # digests, which tell a user nothing
            expected, got = "a checkpoint of a run on these data", "a checkpoint of a run on other data"
        fix = "Resume with the options and the data of the first start, or train into another folder"
        if may_grow:
            expected, got = f"{name} = {was[name]} or more, as in the checkpoint", f"{name} = {now[name]}"
        raise InvalidInput(str(path), got=got, expected=expected, fix=fix)

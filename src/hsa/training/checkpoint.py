"""Checkpoints: all that a run needs to resume as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

from hsa.errors import InvalidInput
from hsa.files import write_then_rename
from hsa.models.saved import check_fits

FORMAT = 2
"""Version of what is written; other versions cannot be resumed. hsa 0.1 wrote version 1."""


def full_weights(model: nn.Module) -> dict[str, Any]:
    """The whole state on the host, whether the model is plain, replicated or sharded over processes."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def set_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """The inverse of `full_weights`, which has them on the first process alone."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation it lies whole in every process
    own = dict(weights) if not several or torch.distributed.get_rank() == 0 else {}
    set_model_state_dict(model, own, options=options)


def gather(model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> dict[str, Any]:
    """The content of a checkpoint. All processes call this; one writes it."""
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
    """Written beside and renamed: a checkpoint that was there survives a full disk."""

    def write(beside: Path) -> None:
        try:
            with beside.open("wb") as file:
                torch.save(content, file)
        except RuntimeError as error:  # torch stumbles over the rest of the archive: what came first says why
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    write_then_rename(path, write)


def load(path: Path) -> dict[str, Any]:
    """The content of a checkpoint; tensors and plain values only, so that a file can do no harm.

    Raises:
        InvalidInput: no file, a damaged one, or no checkpoint of hsa.
    """
    if not path.is_file():
        raise InvalidInput(
            str(path),
            given="no such file",
            expected="a checkpoint",
            fix="start without --resume; there is nothing to resume",
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InvalidInput(
            str(path),
            given=f"a damaged file ({type(error).__name__})",
            expected="a checkpoint of hsa",
            fix="remove it to train this model from the start",
        ) from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT:
        raise InvalidInput(
            str(path),
            given={None: "something else", 1: "a checkpoint of hsa 0.1"}.get(
                version, f"a checkpoint of format {version}"
            ),
            expected=f"a checkpoint of hsa, format {FORMAT}",
            fix="remove it to train this model from the start",
        )
    return content


def restore(path: Path, content: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint into a model and its optimizer; returns the progress.

    Raises:
        InvalidInput: it is one of another model; the message names the first tensor that does not fit.
    """
    # `full_weights` of a model in several processes is empty on all but the first.
    check_fits(
        str(path),
        content["model"],
        {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()},
    )
    set_weights(model, content["model"])
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)
    torch.set_rng_state(content["random"]["cpu"])
    for i, state in enumerate(content["random"]["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, i)
    return content["progress"]


def check_same(path: Path, was: dict[str, Any], now: dict[str, Any]) -> None:
    """The options and the data of a checkpoint are those of the run that is to go on; "data" are compared, not shown."""
    for name in (*now, *was):
        if was.get(name) == now.get(name):
            continue
        given, expected = f"a checkpoint trained with {name} = {was.get(name)}", f"{name} = {now.get(name)}"
        if name == "data":
            given, expected = "a checkpoint of a run on other data", "the data of the first start"
        fix = "resume with the options and the data of the first start, or train into another folder"
        raise InvalidInput(str(path), given=given, expected=expected, fix=fix)

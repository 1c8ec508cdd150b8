"""Devices and processes."""

from __future__ import annotations

from typing import Any

import torch

from hsa.errors import InvalidInput, MissingExtra
from hsa.training.options import TrainingOptions


def make_accelerator(options: TrainingOptions, *, fsdp: bool = False, cpu: bool = False) -> Any:
    """accelerate's handle on devices and processes; started by `accelerate launch` or `torchrun`, there are several."""
    try:
        from accelerate import (  # type: ignore[import-untyped]
            Accelerator,
            DistributedDataParallelKwargs,
            FullyShardedDataParallelPlugin,
        )
        from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
        from accelerate.utils import DistributedType  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("accelerate", "train", "training") from None
    # Accelerate asks to be told that processes without a GPU are to work together.
    cpu = cpu or not torch.accelerator.is_available()
    if PartialState._shared_state and not PartialState().use_distributed:
        AcceleratorState._reset_state(reset_partial_state=True)  # else the first device and precision would be the last
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True) if fsdp else None
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        cpu=cpu,
        fsdp_plugin=plugin,
        # A batch without images does not use the weights of images.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # PyTorch shards on CPUs too; accelerate, left to itself, would replicate.
        if options.mixed_precision != "no":
            plugin.set_mixed_precision(options.mixed_precision)
        PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    if plugin is not None and accelerator.distributed_type != DistributedType.FSDP:
        raise InvalidInput(
            "fsdp",
            given="one process",
            expected="several, to shard the model over",
            fix="start with torchrun --nproc-per-node 2 -m hsa.cli.main train … --fsdp, or leave out --fsdp",
        )
    return accelerator

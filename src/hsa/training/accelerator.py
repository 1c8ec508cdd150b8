"""Setup of accelerate, which places a run on one device or several processes."""

from __future__ import annotations

import atexit
from typing import Any

import torch

from hsa.errors import InvalidInput, MissingExtra
from hsa.training.options import TrainingOptions


def make_accelerator(options: TrainingOptions, *, fsdp: bool = False, cpu: bool = False) -> Any:
    """Return an `Accelerator`. Under `accelerate launch` or `torchrun` it spans several processes.

    Args:
        options: Options with the mixed precision.
        fsdp: Whether to shard the model over the processes.
        cpu: Whether to stay on the CPU where there is a GPU.
    """
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
    # Processes without a GPU form a group only if accelerate is told to use the CPU.
    cpu = cpu or not torch.accelerator.is_available()
    if PartialState._shared_state and not PartialState().use_distributed:
        AcceleratorState._reset_state(
            reset_partial_state=True
        )  # or it keeps the device and precision of the first call
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True) if fsdp else None
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        cpu=cpu,
        fsdp_plugin=plugin,
        # A batch without images has no gradients for the image embedding.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # PyTorch can shard on CPUs, but accelerate would replicate the model there.
        if options.mixed_precision != "no":
            plugin.set_mixed_precision(options.mixed_precision)
        PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    if plugin is not None and accelerator.distributed_type != DistributedType.FSDP:
        raise InvalidInput(
            "fsdp",
            got="one",
            expected="several processes to shard the model over",
            fix="Start with torchrun --nproc-per-node 2 -m hsa.cli.main train … --fsdp, or leave out --fsdp",
        )
    if accelerator.num_processes > 1:
        atexit.unregister(_leave_group)  # once, however many accelerators there are
        atexit.register(_leave_group)
    return accelerator


def _leave_group() -> None:
    """Leave the group of processes: its threads may abort a process that ends while they run."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

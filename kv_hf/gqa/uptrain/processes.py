"""Processes of a run: accelerate's accelerator, and what one process does for all."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, parse_flag_from_env

from ...errors import ConversionError, first_line
from .settings import UptrainSettings, mixed_precision

COMPUTE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def make_accelerator(settings: UptrainSettings) -> Accelerator:
    """Return accelerate's accelerator for these settings.

    Raises: ConversionError for a dtype that the device lacks, for another one than this process has computed in, and for
        what is not data parallelism.
    """
    # accelerate joins processes without GPUs only when it is told that they have none
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # the other processes wait while the first one samples or tokenizes
    waiting = {"timeout": timedelta(hours=12)} if processes > 1 else {}
    state = PartialState(cpu=cpu, **waiting)
    if state.num_processes != processes:
        raise ConversionError(
            f"{processes} processes were started, and accelerate sees {state.num_processes}: it was set up before, without them"
        )
    device = state.device
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    precision = mixed_precision(settings.dtype, device)
    if settings.dtype == "auto" and launched in COMPUTE and launched != "no":
        precision = launched
    plugin = GradientAccumulationPlugin(num_steps=settings.accumulate, sync_with_dataloader=False)
    try:
        accelerator = Accelerator(
            cpu=cpu, mixed_precision=precision, gradient_accumulation_plugin=plugin
        )
    except ValueError as error:  # accelerate has one precision for a process
        raise ConversionError(
            f"dtype {settings.dtype!r} needs a process of its own: an earlier run or Accelerator of this one computes otherwise "
            f"({first_line(error)})"
        ) from error
    if accelerator.distributed_type not in KINDS:
        raise ConversionError(
            f"uptraining runs data parallel (a whole model per process), not as {accelerator.distributed_type.value}"
        )
    return accelerator


class together:
    """A block that fails on all processes where it fails on one, and that the others wait for: of what the main process does for all."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        failed = torch.tensor([int(kind is not None)], device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            failed = self.accelerator.reduce(failed, "sum")
        if kind is None and int(failed):
            raise ConversionError("another process failed; its message says why")

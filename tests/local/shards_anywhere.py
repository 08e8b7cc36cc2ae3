"""Has Accelerate shard on the CPU, too, where it is asked for FSDP2: it would on devices alone."""

from typing import Any

import one_gpu  # type: ignore[import-not-found]  # run as a script, beside it
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def on_devices(state: Any, *_args: Any, **_words: Any) -> tuple[str, Any]:
    """Tell it that its processes have devices each; of a kind of which it does nothing by itself."""
    state.device = torch.device("cpu")
    return "gloo", DistributedType.MULTI_MLU


def begin() -> None:
    """To be called in each process, with a group or before it has one; on a device there is nothing to do."""
    if one_gpu.ON_GPU:
        return
    PartialState._prepare_backend = on_devices
    torch.distributed.init_process_group("gloo")


def reshard(model: Any) -> bool:
    """Have no module be whole, as the outermost may be after an evaluation; whether any is sharded."""
    sharded = [module for module in model.modules() if hasattr(module, "reshard")]
    for module in sharded:
        module.reshard()
    return bool(sharded)


def local(parameter: Any) -> torch.Tensor:
    """Return what this rank has of it."""
    found: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found.detach()

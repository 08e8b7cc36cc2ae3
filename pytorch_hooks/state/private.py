"""Every attribute of torch that is not public and that saving state needs."""

import io
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ckptless.pytorch_hooks.devices.arrival import Arrival

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Give this rank's part of a DTensor (`DTensor._local_tensor`), or the tensor itself; no copy."""
    if type(tensor) in _PLAIN:
        return tensor
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def version(tensor: torch.Tensor) -> int:
    """Count the in-place writes that torch knows of (`Tensor._version`); -1 where it does not count.

    The running statistics of `torch.nn.functional.batch_norm` are written without being counted. A lazy
    module's tensors answer nothing before its first forward pass.
    """
    return -1 if hasattr(tensor, "materialize") or tensor.is_inference() else tensor._version


def storage(tensor: torch.Tensor) -> int:
    """Give where the memory begins that this rank's part of a tensor lies in; 0 where it has none."""
    part = local(tensor)
    return 0 if part.is_meta else part.untyped_storage().data_ptr()


def syncs_buffers(module: torch.nn.Module) -> bool:
    """Return whether a DDP gives all ranks the first one's buffers next (`require_forward_param_sync`).

    It does not where the forward pass before was under `no_sync()`.
    """
    return isinstance(module, DistributedDataParallel) and module.require_forward_param_sync


def sync_buffers(module: torch.nn.Module, will: bool) -> None:
    """Have a DDP do so or not; of another module nothing."""
    if isinstance(module, DistributedDataParallel):
        module.require_forward_param_sync = will


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Give a module's own parameters by name: the living dict (`Module._parameters`)."""
    return module._parameters  # type: ignore[return-value]  # Parameter is a Tensor; we only read it


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Give a module's own buffers by name: the living dict (`Module._buffers`); an item may be replaced."""
    return module._buffers


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Give a module's own children by name: the living dict (`Module._modules`)."""
    return module._modules


def hooks_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Give the functions that a module calls by the way, by what torch calls them (`_forward_hooks`...).

    Not those of FSDP2 and of `replicate`: they keep where a forward pass is, and are renewed.
    """
    renewed = ("torch.distributed.fsdp.", "torch.distributed._composable.")
    for kind in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks"):
        for index, hook in enumerate(list(getattr(module, f"_{kind}", {}).values())):
            if not str(getattr(hook, "__module__", "")).startswith(renewed):
                yield f"{kind}[{index}]", hook


def hooks_of_parameters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Give the functions that see gradients, of a module's own parameters and DDP's buckets, and their state.

    `Tensor._backward_hooks` and `_post_accumulate_grad_hooks`, `DistributedDataParallel._comm_hooks`.
    """
    for name, parameter in module._parameters.items():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for index, hook in enumerate(list((getattr(parameter, kind, None) or {}).values())):
                yield f"{name}.{kind.lstrip('_')}[{index}]", hook
    for index, (hook, state) in enumerate(getattr(module, "_comm_hooks", ())):
        yield f"comm_hooks[{index}]", hook
        yield f"comm_hooks[{index}].state", state


def comm_hook_states(module: torch.nn.Module) -> list[object]:
    """Give what DDP's communication hooks keep (`DistributedDataParallel._comm_hooks`)."""
    return [state for _hook, state in getattr(module, "_comm_hooks", ()) if state is not None]


def has_extra_state(module: torch.nn.Module) -> bool:
    """Say whether a module's class has a `get_extra_state` of its own, as those of Transformer Engine."""
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def bare_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """Give `module.state_dict()` without what hooks make of it: they may gather what other ranks have."""
    hooks = [(one, one._state_dict_hooks) for one in module.modules() if one._state_dict_hooks]
    for one, _those in hooks:
        vars(one)["_state_dict_hooks"] = OrderedDict()
    try:
        return module.state_dict(keep_vars=True)
    finally:
        for one, those in hooks:
            vars(one)["_state_dict_hooks"] = those


def extra_state_of(module: torch.nn.Module) -> object:
    """Give `module.get_extra_state()`; of a file in memory, which some give, its bytes in a list."""
    state: object = module.get_extra_state()
    return [state.getvalue()] if isinstance(state, io.BytesIO) else state


def load_extra_state(module: torch.nn.Module, state: Any) -> None:
    """Call `module.set_extra_state` with what `extra_state_of` gave."""
    in_file = type(state) is list and len(state) == 1 and type(state[0]) is bytes
    module.set_extra_state(io.BytesIO(state[0]) if in_file else state)


def queue_copies(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Arrival:
    """Queue the copy of each source into its target (same shape and dtype, any devices).

    By `torch._foreach_copy_`. What is on the CPU on both sides has been copied when this returns.
    """
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
    return Arrival(tensor.device for tensor in (*targets, *sources))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Do as `queue_copies`, and return when the bytes are there."""
    # no deadline: the device's own work; the end of the generation frees it
    queue_copies(targets, sources).wait()


def sharding(tensor: torch.Tensor, like: torch.Tensor | None) -> str:
    """Name how a DTensor is laid out: "" no DTensor, "param" as `like`, "replicated", or "other"."""
    spec = getattr(tensor, "_spec", None) if type(tensor) not in _PLAIN else None
    if spec is None:
        return ""
    if like is not None and tensor.shape == like.shape and spec.placements == like._spec.placements:  # type: ignore[attr-defined]
        return "param"
    return "replicated" if all(p.is_replicate() for p in spec.placements) else "other"


def placed(tensor: torch.Tensor) -> tuple[Any, tuple[int, ...]] | None:
    """Give a DTensor's mesh and the dimensions of it over which the tensor is not replicated, or None."""
    spec = getattr(tensor, "_spec", None) if type(tensor) not in _PLAIN else None
    if spec is None:
        return None
    return spec.mesh, tuple(i for i, p in enumerate(spec.placements) if not p.is_replicate())


def replicated(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Wrap a local tensor as a DTensor that is whole on every rank of the mesh of `like` (a DTensor)."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    wrapped: torch.Tensor = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return wrapped


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Put FSDP2 modules back to their shards; a forward pass without a backward leaves the root gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return
    for module in modules:
        if isinstance(module, kind):
            module.reshard()


def state_dict_of(one: Any) -> dict[str, Any]:
    """Give `one.state_dict()`; of an SWALR without `anneal_func`, a function that its constructor gives it.

    Torches before 2.10 leave it in, and no function can be saved; its `load_state_dict` does without it.
    """
    state: dict[str, Any] = one.state_dict()
    kind: Any = getattr(sys.modules.get("torch.optim.swa_utils"), "SWALR", None)
    if kind is None or not isinstance(one, kind) or "anneal_func" not in state:
        return state
    return {key: value for key, value in state.items() if key != "anneal_func"}


def scaler_enabled(scaler: object) -> bool:
    """Say whether a GradScaler does anything; one that is off has an empty state_dict (`is_enabled`)."""
    return bool(getattr(scaler, "is_enabled", lambda: True)())


def scaler_busy(scaler: object) -> bool:
    """Say whether a GradScaler stands between `unscale_`/`step` and `update` (`_per_optimizer_states`)."""
    return bool(getattr(scaler, "_per_optimizer_states", None))


def after_step(one: Any, call: Callable[..., None]) -> None:
    """Have `call(one, *arguments)` made after each `one.step(*arguments)`; nothing where it has no `step`."""
    step = getattr(one, "step", None)
    if not callable(step):
        return

    def stepped(*args: Any, **kwargs: Any) -> Any:
        found = step(*args, **kwargs)
        call(one, *args)
        return found

    one.step = stepped


def scaler_device(scaler: object) -> torch.device | None:
    """Return the device that a GradScaler has its scale on, or None: it has none yet, or on the CPU."""
    scale = getattr(scaler, "_scale", None)
    return scale.device if isinstance(scale, torch.Tensor) and scale.device.type != "cpu" else None


def scaler_copy(scaler: Any) -> Any:
    """Return a copy of a GradScaler whose `state_dict` waits for no device, once its tensors are there."""
    # Not by copy.copy: a scaler's __getstate__ reads its scale.
    found = object.__new__(type(scaler))
    found.__dict__.update(vars(scaler))
    for name in ("_scale", "_growth_tracker"):
        value = getattr(scaler, name, None)
        if isinstance(value, torch.Tensor):
            setattr(found, name, value.detach().to("cpu", non_blocking=True))
    return found


def scaler_clear(scaler: object, optimizers: Iterable[object]) -> None:
    """Make a GradScaler forget a half-done step, as its `update` would.

    An exception inside `scaler.step` also leaves `grad_scale` and `found_inf` on a fused optimizer, and the
    next step would multiply by them.
    """
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is not None:
        states.clear()
    for optimizer in optimizers:
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)

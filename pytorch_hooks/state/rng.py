"""The random number generators of this process: read, and put back."""

import random
import sys
from array import array
from importlib import import_module
from typing import Any

import msgspec
import torch
import xxhash

from ckptless.daemon.protocol.errors import ProtocolError, RecoveryError
from ckptless.pytorch_hooks.devices import accelerator
from ckptless.pytorch_hooks.state import raw


class _State(msgspec.Struct, forbid_unknown_fields=True):
    python: tuple[int, bytes, float | None]
    torch_cpu: Any
    numpy: dict[str, Any] | None
    # Of all devices of one kind, "cuda" or another accelerator.
    cuda: list[Any]
    cuda_current: int
    kind: str = "cuda"


def capture() -> dict[str, Any]:
    """Return the state of Python's `random`, numpy's global generator (where numpy is imported), torch's CPU
    generator and those of all devices of the accelerator that is in use. No CUDA device is waited for.

    It is a tree that `codec` can encode and `restore` takes, of about 8 KB: 2.5 KB each for Python and numpy,
    5 KB for torch, 16 B for a device.
    """
    version, words, gauss = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    device = accelerator.in_use()
    module = torch.get_device_module(device) if device is not None else None
    return {
        "python": (version, array("I", words).tobytes(), gauss),
        "torch_cpu": torch.default_generator.get_state(),
        "numpy": numpy.random.get_state(legacy=False) if numpy is not None else None,
        "cuda": module.get_rng_state_all() if module is not None else [],
        "cuda_current": device.index if device is not None else 0,
        "kind": device.type if device is not None else "cuda",
    }


def equal(one: Any, other: Any) -> bool:
    """Return whether two captured states are the same: nothing was drawn between them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)


def restore(state: object) -> None:
    """Put back what `capture` read, maybe in another process.

    The state of the device that was current goes to the device that is current here: a spare may sit at
    another local index. ProtocolError if `state` is malformed; RecoveryError if numpy or CUDA were used then
    and are missing here.
    """
    try:
        wanted = msgspec.convert(state, _State)
        words = tuple(array("I", wanted.python[1]))
        random.setstate((wanted.python[0], words, wanted.python[2]))
        torch.set_rng_state(wanted.torch_cpu)
        _restore_numpy(wanted.numpy)
        _restore_devices(wanted.kind, wanted.cuda, wanted.cuda_current)
    except (msgspec.ValidationError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ProtocolError(f"malformed state of the random number generators: {error}") from error


def branch(other: object, number: int) -> None:
    """Seed anew, by `number`, the generators of this process that were not the same on all ranks.

    They are as on the rank that this one takes after; `other` is what `capture` has read on another rank,
    None where there was none. What was the same on both stays.
    """
    mine = capture()
    theirs = other if isinstance(other, dict) else {}
    differs = {key for key, value in mine.items() if not equal(value, theirs.get(key))}
    seed = xxhash.xxh3_64_intdigest(raw.to_bytes(mine["torch_cpu"]) + number.to_bytes(8, "little"))
    numpy: Any = sys.modules.get("numpy")
    if "python" in differs:
        random.seed(seed)
    if "torch_cpu" in differs:
        torch.default_generator.manual_seed(seed)
    if "numpy" in differs and numpy is not None:
        numpy.random.seed(seed % (1 << 32))
    if "cuda" in differs and mine["cuda"]:
        torch.get_device_module(mine["kind"]).manual_seed_all(seed)


def seed(number: int) -> None:
    """Seed all generators that `capture` reads, the present device's among them, by 64 bits."""
    random.seed(number)
    torch.default_generator.manual_seed(number)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number % (1 << 32))
    device = accelerator.in_use()
    if device is not None:
        torch.get_device_module(device).manual_seed(number)


def digest(state: dict[str, Any]) -> int:
    """Return a digest of what `capture` has read, of devices of the present one: 63 bits."""
    hasher = xxhash.xxh3_64()
    version, words, gauss = state["python"]
    hasher.update(repr((version, gauss)).encode())
    hasher.update(words)
    hasher.update(raw.to_bytes(state["torch_cpu"]))
    numpy = state["numpy"]
    if numpy is not None:
        hasher.update(numpy["state"]["key"].tobytes())
        hasher.update(repr((numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])).encode())
    if state["cuda"]:
        hasher.update(raw.to_bytes(state["cuda"][state["cuda_current"]]))
    return hasher.intdigest() >> 1


def _restore_numpy(state: dict[str, Any] | None) -> None:
    if state is None:
        return
    try:
        # Not imported here yet, but it was there: what imports it later must not start from a fresh seed.
        numpy: Any = import_module("numpy")
    except ImportError as error:
        raise RecoveryError(
            "numpy was imported when the record was made and is not installed here"
        ) from error
    numpy.random.set_state(state)


def _restore_devices(kind: str, states: list[Any], current: int) -> None:
    if not states:
        return
    if accelerator.present() != kind:
        raise RecoveryError(f"the record holds {kind} generators and this process has no {kind} device")
    if not 0 <= current < len(states):
        raise ProtocolError(f"the record's current device is {current} of {len(states)}")
    module = torch.get_device_module(kind)
    here, count = module.current_device(), module.device_count()
    order = list(range(max(count, len(states))))
    order[here], order[current] = order[current], order[here]
    for device, source in enumerate(order[:count]):
        if source < len(states):
            module.set_rng_state(states[source], device)

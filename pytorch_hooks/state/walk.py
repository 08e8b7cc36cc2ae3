"""The modules, parameters and buffers under a State: named, each once, in one fixed order.

Names: `p:model:layers.0.weight` (parameter), `b:model:bn.running_mean` (buffer), where `model` is what the
State calls the root module; tied modules and tensors are known by their first name only.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import xxhash

from ckptless.pytorch_hooks.state import private, raw


def shown(name: str) -> str:
    """Return a tensor's or a module's name as a user would write it: "state.model.layers.0.weight"."""
    return "state." + name[2:].replace(":", ".").rstrip(".")


class Owned(NamedTuple):
    """A buffer (any shape, dtype) with its name, and where it hangs: `module`'s buffer `key`."""

    name: str
    tensor: torch.Tensor
    module: torch.nn.Module
    key: str


class Tree:
    """The modules under some named roots; the walk is done again only where a submodule was replaced."""

    def __init__(self, roots: dict[str, torch.nn.Module]) -> None:
        self._roots = roots
        self._watched: list[tuple[dict[str, torch.nn.Module | None], tuple[int, ...]]] = []
        self._modules: list[tuple[str, torch.nn.Module]] = []
        self._walk()

    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Give all modules, depth first, each with the prefix of its tensors' names ("model:layers.0.")."""
        for children, ids in self._watched:
            if tuple(map(id, children.values())) != ids:
                self._walk()
                break
        return self._modules

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Give every parameter (any shape, dtype; maybe a DTensor) once, by name."""
        seen: set[int] = set()
        for prefix, module in self.modules():
            for key, tensor in private.parameters_of(module).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"p:{prefix}{key}", tensor

    def buffers(self) -> Iterator[Owned]:
        """Give every buffer (any shape, dtype), also those that are not persistent, once."""
        seen: set[int] = set()
        for prefix, module in self.modules():
            for key, tensor in private.buffers_of(module).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield Owned(f"b:{prefix}{key}", tensor, module, key)

    def with_extra_state(self) -> list[tuple[str, torch.nn.Module]]:
        """Give the modules that have a `get_extra_state` of their own, each with its prefix."""
        return [(prefix, module) for prefix, module in self.modules() if private.has_extra_state(module)]

    def slots(self) -> dict[str, tuple[torch.nn.Module, str]]:
        """Give the place of every buffer by name, empty ones (None) and tied ones included."""
        return {
            f"b:{prefix}{key}": (module, key)
            for prefix, module in self.modules()
            for key in private.buffers_of(module)
        }

    def _walk(self) -> None:
        self._watched, self._modules = [], []
        seen: set[int] = set()
        for root, module in self._roots.items():
            self._visit(f"{root}:", module, seen)

    def _visit(self, prefix: str, module: torch.nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        self._modules.append((prefix, module))
        children = private.children_of(module)
        # The modules are held in the list above, so that an id cannot come back as another module's.
        self._watched.append((children, tuple(map(id, children.values()))))
        for name, child in children.items():
            if child is not None:
                self._visit(f"{prefix}{name}.", child, seen)


class BufferWatch:
    """The buffers that differ from those that the State was built with: they are each rank's own.

    A buffer has changed when it was replaced, or written in place: torch counts that, but not by `.data`; so
    those on the CPU are digested as well (some 0.1 ms for each MiB that has not changed). So has one whose
    module has another that changed, and a running statistic of a module in training mode: batch norm writes
    those without torch counting it, and one step later they differ from rank to rank.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._known: dict[str, tuple[torch.Tensor, int, int]] = {}
        self._changed: set[str] = set()
        # By name those that the newest record has: each rank's own.
        self.recorded: frozenset[str] = frozenset()
        self.rebase(set())

    def changed(self) -> list[Owned]:
        """Give the buffers that have changed; one that changed once stays so until `rebase`."""
        buffers = list(self._tree.buffers())
        touched: set[int] = set()
        for name, tensor, module, _key in buffers:
            if not self._is_as_known(name, tensor):
                self._changed.add(name)
                touched.add(id(module))
        for name, tensor, module, key in buffers:
            running = module.training and key.startswith("running_") and tensor.is_floating_point()
            if running or id(module) in touched:
                self._changed.add(name)
        return [item for item in buffers if item.name in self._changed]

    def _is_as_known(self, name: str, tensor: torch.Tensor) -> bool:
        known = self._known.get(name)
        if known is None or known[0] is not tensor or not 0 <= known[1] == private.version(tensor):
            return False
        return name in self._changed or known[2] == _digest(tensor)

    def record(self) -> list[Owned]:
        """Give the buffers that have changed, which a record is made of now."""
        changed = self.changed()
        self.recorded = frozenset(item.name for item in changed)
        return changed

    def rebase(self, changed: set[str]) -> None:
        """Take the buffers as they stand for unchanged, but for those named."""
        self._changed, self.recorded = set(changed), frozenset(changed)
        self._known = {
            b.name: (b.tensor, private.version(b.tensor), _digest(b.tensor)) for b in self._tree.buffers()
        }


def _digest(tensor: torch.Tensor) -> int:
    part = private.local(tensor)
    if part.device.type != "cpu" or raw.why_not(part) is not None:
        return 0
    flat = raw.flat(part)
    return xxhash.xxh3_64_intdigest(raw.window(flat))

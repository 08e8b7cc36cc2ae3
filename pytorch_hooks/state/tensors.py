"""The tensors of a State as one flat buffer: packed at a commit, unpacked after a fault."""

from typing import Any, NamedTuple

import torch

from ckptless.daemon.protocol.errors import RecoveryError, UsageError
from ckptless.pytorch_hooks.devices.arrival import Arrival
from ckptless.pytorch_hooks.state import as_built, catalog, optim, private, raw
from ckptless.pytorch_hooks.state import layout as layouts
from ckptless.pytorch_hooks.state.layout import Entry, Layout, Named
from ckptless.pytorch_hooks.state.objects import State, every_tensor, parts_of, tree_of, watch_of

_VIEWED = 4
_Watched = list[tuple[Any, tuple[int, ...]]]


def _ids(container: Any) -> tuple[int, ...]:
    return tuple(map(id, container if isinstance(container, list) else container.values()))


def _containers(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Give what an optimizer has its state and parameters in; `load_state_dict` puts others in place."""
    groups = optimizer.param_groups
    return [optimizer.state, groups, *(group["params"] for group in groups)]


class TensorCopy(NamedTuple):
    """One tensor's: `target` (a view of the buffer, from `offset` on) is to be as `source` is.

    `source` shares its memory with what the training has, and keeps that memory alive. It is `by_update`
    where only an optimizer's step changes it, `frozen` where nothing of the training should.
    """

    name: str
    offset: int
    target: torch.Tensor
    source: torch.Tensor
    by_update: bool
    frozen: bool


class TensorSet:
    """Parameters, buffers and optimizer state of a State, in one order, and where each lies when packed.

    Names: `p:model:layers.0.weight`, `b:model:bn.running_mean`, `o:optimizer:0.3:exp_avg` (group 0, parameter
    3). Of a DTensor only this rank's part counts. Parameters that need no gradient come first, so that what
    does not change from step to step lies together. One thread at a time.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self._watched: _Watched = []
        self._optimizers: _Watched = []
        self._nested = False
        self._scanned = False
        self._named: list[Named] = []
        # The layout that was looked at last, and the device besides the CPU that tensors lie on then.
        self.planned = layouts.plan(())
        self.device: torch.device | None = None
        self._catalog: bytes | None = None
        self._forms: list[tuple[torch.dtype, torch.Size, bool]] = []
        self._spans: tuple[tuple[str, frozenset[str]], tuple[tuple[int, int], ...]] = ("", frozenset()), ()
        self._views: dict[tuple[int, int], tuple[str, list[torch.Tensor]]] = {}
        self._aliases: list[torch.Tensor] = []
        self._updated: list[bool] = []
        self._names: dict[int, str] | None = None
        self._scans = 0
        self._scan()
        self._built = as_built.structure_of(state)
        self._looked = self._scans
        self._shared, self._addresses = as_built.shared(self._named), as_built.addresses(self._named)

    @property
    def layout(self) -> Layout:
        """The layout that the next `pack` would use; looks for changes first."""
        self.refresh()
        return self.planned

    @property
    def catalog(self) -> bytes:
        """The packed catalog of the layout last looked at; made once for it."""
        if self._catalog is None:
            optimizers = parts_of(self.state).optimizers
            self._catalog = catalog.make(self._named, optimizers, tree_of(self.state).modules())
        return self._catalog

    @property
    def names(self) -> dict[int, str]:
        """The name of each tensor by the id of the living object, as it was looked at last."""
        if self._names is None:
            self._names = {id(n.tensor): n.name for n in self._named}
        return self._names

    @property
    def living(self) -> dict[str, torch.Tensor]:
        """The living tensors by name, as they were looked at last."""
        return {n.name: n.tensor for n in self._named}

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Give (name, tensor): this rank's parts, detached, sharing memory with the living ones."""
        self.refresh()
        return [(n.name, private.local(n.tensor).detach()) for n in self._named]

    def refresh(self) -> bool:
        """Look whether tensors came, went or were replaced since the last look; True if the layout changed.

        The usual answer, no, costs about a microsecond for each tensor, where there are thousands.
        """
        before = self.planned.digest
        if self._nested or not self._scanned or self._stale():
            # A forward pass without a backward leaves FSDP2's root gathered: those are not the shards.
            private.reshard(module for _prefix, module in tree_of(self.state).modules())
            self._scan()
        return self.planned.digest != before

    def check_built(self) -> None:
        """Raise UsageError where the state is not made of what it was built of, as a new process would be."""
        self.refresh()
        if self._looked != self._scans:
            as_built.check_built(self._built, self.state)
            self._looked = self._scans

    def check_shared(self) -> None:
        """Raise UsageError where tensors lie in one memory that did not when they were built."""
        if (addresses := as_built.addresses(self._named)) != self._addresses:
            as_built.check_shared(self._shared, as_built.shared(self._named))
            self._addresses = addresses

    def pack(self, buffer: torch.Tensor) -> Layout:
        """Copy all tensors into `buffer` (uint8, 1-D, on the CPU) and return where each lies.

        The buffer's memory stays referenced until `release`. UsageError if the buffer is unfit or smaller
        than the layout.
        """
        # no deadline: the device's own work; the end of the generation frees it
        self.queue(buffer).wait()
        return self.planned

    def queue(self, buffer: torch.Tensor) -> Arrival:
        """Do as `pack`; copies from a device are queued there, behind the training, before what follows."""
        self.refresh()
        _check_buffer(buffer, self.planned.nbytes)
        sources = [private.local(n.tensor) for n in self._named]
        return private.queue_copies(self._viewed(buffer), [s for s in sources if s.numel()])

    def copies(self, buffer: torch.Tensor) -> list[TensorCopy]:
        """Give what `pack` would copy, in the order of the layout. Raises as `pack`.

        Only an update changes the optimizers' state, and the parameters of modules (as the State names them)
        that an optimizer has parameters of; not those of a moving average. Frozen are parameters that need no
        gradient, and buffers.
        """
        self.refresh()
        _check_buffer(buffer, self.planned.nbytes)
        made: list[TensorCopy] = []
        parts = [private.local(n.tensor) for n in self._named]
        aliases = self._aliased(parts)
        filled = [index for index, part in enumerate(parts) if part.numel()]
        for index, target in zip(filled, self._viewed(buffer), strict=True):
            entry = self.planned.entries[index]
            trained = entry.name[0] == "o" or self._forms[index][2]
            made.append(
                TensorCopy(
                    entry.name, entry.offset, target, aliases[index], self._updated[index], not trained
                )
            )
        return made

    def differs(self, buffer: torch.Tensor) -> str | None:
        """Name the first living tensor whose bytes are not those that were packed into `buffer`."""
        for one in self.copies(buffer):
            if not torch.equal(raw.flat(one.source), raw.flat(one.target)):
                return one.name
        return None

    def release(self) -> None:
        """Forget all buffers that were packed into, so that their memory can be unmapped."""
        self._views.clear()
        self._aliases = []

    def unpack(self, buffer: torch.Tensor, layout: Layout) -> None:
        """Copy a packed buffer (uint8, 1-D, on the CPU) back into the living tensors, in place where it can.

        Optimizer state that does not exist yet is made, what did not exist then is removed; a buffer of a
        module that had another shape is replaced. Follow with `record.restore`: state of an optimizer that is
        not a tensor comes from there. ProtocolError for a bad layout, RecoveryError if it does not fit the
        parameters; nothing is changed then.
        """
        layouts.check(layout)
        _check_buffer(buffer, layout.nbytes)
        self.refresh()
        groups: dict[str, dict[str, Entry]] = {"p": {}, "b": {}, "o": {}}
        for entry in layout.entries:
            if entry.name[:2] not in ("p:", "b:", "o:"):
                raise RecoveryError(f"{entry.name} is no name of a tensor here")
            groups[entry.name[0]][entry.name] = entry
        self._check_parameters(groups["p"])
        states = self._match_optimizers(groups["o"])
        self._check_buffers(groups["b"])
        changed = {b.name for b in watch_of(self.state).changed()}
        self._make_buffers(groups["b"])
        for optimizer, parameter, own in states:
            _make_state(optimizer, parameter, own)
        self._scan()
        as_built.separate(self._shared, self._named)
        living = {n.name: private.local(n.tensor) for n in self._named}
        entries = [e for e in layout.entries if e.nbytes]
        private.copy_all([living[e.name] for e in entries], [view(buffer, e) for e in entries])
        # Writing them was not the model's doing: what was unchanged stays so.
        watch_of(self.state).rebase(changed)

    def spans(self, names: frozenset[str]) -> tuple[tuple[int, int], ...]:
        """Return where these tensors lie in what was packed last: (start, end), neighbours in one."""
        key = (self.planned.digest, names)
        if self._spans[0] != key:
            found: list[tuple[int, int]] = []
            for entry in self.planned.entries if names else ():
                if entry.name not in names:
                    continue
                start, end = entry.offset, entry.offset + entry.nbytes
                if found and start - found[-1][1] < layouts.ALIGN:
                    start = found.pop()[0]
                found.append((start, end))
            self._spans = key, tuple(found)
        return self._spans[1]

    # ---- what there is

    def _stale(self) -> bool:
        # What is watched is of no use once the optimizer has something else in its place.
        for optimizer, known in self._optimizers:
            if _ids(_containers(optimizer)) != known:
                return True
        for container, known in self._watched:
            if _ids(container) != known:
                return True
        for named, (dtype, shape, trained) in zip(self._named, self._forms, strict=True):
            part = private.local(named.tensor)
            if part.dtype is not dtype or part.shape != shape or named.tensor.requires_grad is not trained:
                return True
        return False

    def _scan(self) -> None:
        # Until this has succeeded the next look must come here again.
        self._watched, self._optimizers, self._nested, self._scanned = [], [], False, False
        # Strong references: an id in the watch list cannot come back as another tensor's.
        self._watch_all()
        self._named = sorted(every_tensor(self.state), key=_is_trained)
        fresh = layouts.plan(self._named)
        parts = [(n, private.local(n.tensor)) for n in self._named]
        self._forms = [(part.dtype, part.shape, n.tensor.requires_grad) for n, part in parts]
        self.device = next((part.device for _n, part in parts if part.device.type != "cpu"), None)
        self._aliases, self._updated, self._names = [], self._updates(), None
        if fresh.digest != self.planned.digest:
            self.planned, self._catalog = fresh, None
        self._scanned = True
        self._scans += 1

    def _updates(self) -> list[bool]:
        """Return of each tensor whether it is an optimizer's to change."""
        optimizers = parts_of(self.state).optimizers.values()
        theirs = {id(parameter) for one in optimizers for _place, parameter in optim.parameters(one)}
        roots = {n.name.split(":")[1] for n in self._named if n.name[0] == "p" and id(n.tensor) in theirs}
        return [n.name[0] == "o" or (n.name[0] == "p" and n.name.split(":")[1] in roots) for n in self._named]

    def _aliased(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return for each part another tensor on the same memory, made anew where any has got another."""
        if not self._aliases or any(
            a.data_ptr() != p.data_ptr() for a, p in zip(self._aliases, parts, strict=True)
        ):
            self._aliases = [part.detach() for part in parts]
        return self._aliases

    def _watch(self, container: Any) -> None:
        self._watched.append((container, _ids(container)))

    def _watch_all(self) -> None:
        """Watch every container in which a tensor may come, go or be replaced. Raises UsageError."""
        for _prefix, module in tree_of(self.state).modules():
            self._watch(private.parameters_of(module))
            self._watch(private.buffers_of(module))
            self._watch(private.children_of(module))
        for name, optimizer in parts_of(self.state).optimizers.items():
            optim.check(name, optimizer)
            containers = _containers(optimizer)
            self._optimizers.append((optimizer, _ids(containers)))
            for container in containers:
                self._watch(container)
            for _place, parameter in optim.parameters(optimizer):
                # Also an empty one: whoever looks up a parameter's makes it, and a step fills it.
                if (state := optimizer.state.get(parameter)) is not None:
                    self._watch(state)
                    self._nested |= any(type(value) in (list, tuple, dict) for value in state.values())

    def _viewed(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        key = (buffer.data_ptr(), buffer.numel())
        digest, views = self._views.get(key, ("", []))
        if digest != self.planned.digest:
            # The gaps between the tensors must be the same on every twin.
            buffer[: self.planned.nbytes].zero_()
            views = [view(buffer, e) for e in self.planned.entries if e.nbytes]
            self._views[key] = (self.planned.digest, views)
            while len(self._views) > _VIEWED:
                del self._views[next(iter(self._views))]
        return views

    # ---- back into the living

    def _check_parameters(self, wanted: dict[str, Entry]) -> None:
        living = {n.name: n.tensor for n in self._named if n.name.startswith("p:")}
        for name in (*living, *wanted):
            if name not in wanted or name not in living:
                where = "here but not in the saved state" if name in living else "saved but not here"
                raise RecoveryError(f"the parameter {name} is {where}")
            if not _same(living[name], wanted[name]):
                part = private.local(living[name])
                raise RecoveryError(
                    f"the parameter {name} is {tuple(part.shape)} {part.dtype} here and was saved as "
                    f"{wanted[name].shape} {wanted[name].dtype}"
                )

    def _check_buffers(self, wanted: dict[str, Entry]) -> None:
        slots = tree_of(self.state).slots()
        for name in wanted:
            if name not in slots:
                raise RecoveryError(f"the buffer {name} was saved but is not here")

    def _make_buffers(self, wanted: dict[str, Entry]) -> None:
        slots = tree_of(self.state).slots()
        living = {n.name: n.tensor for n in self._named if n.name.startswith("b:")}
        for name in living.keys() - wanted.keys():
            module, key = slots[name]
            private.buffers_of(module)[key] = None
        for name, entry in wanted.items():
            if name in living and _same(living[name], entry):
                continue
            module, key = slots[name]
            device = self._device(entry, living.get(name))
            private.buffers_of(module)[key] = torch.empty(
                entry.shape, dtype=raw.DTYPES[entry.dtype], device=device
            )

    def _device(self, entry: Entry, like: torch.Tensor | None) -> torch.device:
        for tensor in (like, *(n.tensor for n in self._named[:1])):
            if tensor is not None and tensor.device.type == entry.device:
                return tensor.device
        return torch.device(entry.device)

    def _match_optimizers(
        self, wanted: dict[str, Entry]
    ) -> list[tuple[torch.optim.Optimizer, torch.Tensor, dict[str, Entry]]]:
        places: dict[str, dict[str, Entry]] = {}
        for name, entry in wanted.items():
            prefix = name.split(":", 3)
            places.setdefault(":".join(prefix[:3]), {})[prefix[-1]] = entry
        states = []
        for name, optimizer in parts_of(self.state).optimizers.items():
            for place, parameter in optim.parameters(optimizer):
                entries = places.pop(f"o:{name}:{place}", {})
                if not _state_fits(optimizer, parameter, entries):
                    states.append((optimizer, parameter, entries))
        if places:
            raise RecoveryError(f"state was saved for {next(iter(places))}, which is not a parameter here")
        for _optimizer, _parameter, entries in states:
            for path, entry in entries.items():
                if entry.sharding == "other":
                    raise RecoveryError(f"the optimizer state {path} is a DTensor that cannot be made anew")
        return states


def _is_trained(named: Named) -> bool:
    return named.tensor.requires_grad or not named.name.startswith("p:")


def _check_buffer(buffer: torch.Tensor, nbytes: int) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or not buffer.is_cpu:
        raise UsageError("the buffer must be a contiguous 1-D uint8 tensor on the CPU")
    if buffer.numel() < nbytes:
        raise UsageError(f"the buffer has {buffer.numel()} bytes and the tensors take {nbytes}")
    if nbytes and (buffer.storage_offset() % 16 or buffer.data_ptr() % 16):
        raise UsageError("the buffer must start at a multiple of 16 bytes")


def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return an entry's tensor in a packed buffer."""
    flat = buffer[entry.offset : entry.offset + entry.nbytes]
    return flat.view(raw.DTYPES[entry.dtype]).view(entry.shape)


def _same(tensor: torch.Tensor, entry: Entry) -> bool:
    part = private.local(tensor)
    return part.dtype == raw.DTYPES[entry.dtype] and tuple(part.shape) == entry.shape


def _state_fits(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, entries: dict[str, Entry]) -> bool:
    living = dict(optim.leaves(optimizer.state.get(parameter, {})))
    if living.keys() != entries.keys():
        return False
    return all(
        _same(tensor, entries[path])
        and tensor.device.type == entries[path].device
        and private.sharding(tensor, parameter) == entries[path].sharding
        for path, tensor in living.items()
    )


def _make_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, entries: dict[str, Entry]) -> None:
    # Not by load_state_dict: it casts every float to the parameter's dtype (fp32 moments of bf16 weights).
    optimizer.state.pop(parameter, None)
    if entries:
        optimizer.state[parameter] = {path: _empty(parameter, entry) for path, entry in entries.items()}


def _empty(parameter: torch.Tensor, entry: Entry) -> torch.Tensor:
    dtype = raw.DTYPES[entry.dtype]
    part = private.local(parameter)
    here = part.device.type == entry.device
    device = part.device if here else torch.device(entry.device)
    with torch.no_grad():
        if entry.sharding == "param":
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        if here and entry.shape == tuple(part.shape):
            # With the parameter's strides, as optimizers make it.
            made = torch.empty_like(part, dtype=dtype, requires_grad=False)
        else:
            made = torch.empty(entry.shape, dtype=dtype, device=device)
        return private.replicated(made, parameter) if entry.sharding == "replicated" else made

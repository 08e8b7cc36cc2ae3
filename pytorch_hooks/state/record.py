"""The record: all that the next step depends on and that is not in the tensors' buffer; some 10 KB a rank."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
import xxhash

from ckptless.daemon.protocol.errors import ProtocolError, RecoveryError, UsageError
from ckptless.pytorch_hooks.devices.arrival import Arrival
from ckptless.pytorch_hooks.state import attributes, catalog, codec, layout, optim, private, rng
from ckptless.pytorch_hooks.state.catalog import Catalog
from ckptless.pytorch_hooks.state.layout import Layout
from ckptless.pytorch_hooks.state.objects import (
    State,
    attributes_of,
    every_parameter,
    parts_of,
    tree_of,
    watch_of,
)
from ckptless.pytorch_hooks.state.parts import Parts
from ckptless.pytorch_hooks.state.tensors import TensorSet

DdpLayouts = dict[str, list[list[int]]]
"""For each DDP module by name: its gradient buckets, each a list of parameter numbers."""


class RecordView(msgspec.Struct, frozen=True):
    """The record's own description: its step, data cursor, DDP's buckets and the tensors' layout then.

    `exact`: of a job whose bits do not depend on the number of ranks, the virtual ones' number and seed.
    """

    step: int
    cursor: Any
    ddp_layouts: DdpLayouts
    layout: Layout
    exact: tuple[int, int] | None = None


class Described(msgspec.Struct, frozen=True):
    """The record's description of its tensors, and of each optimizer but its tensors."""

    layout: Layout
    catalog: Catalog
    optimizers: dict[str, optim.OptimizerTree]


class _Flags(msgspec.Struct, forbid_unknown_fields=True):
    """One bit for each of `count` things, least significant first."""

    count: int
    bits: bytes


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """The bytes fields are `codec.pack`ed trees, but for `layout` and `catalog` (`TensorSet.catalog`)."""

    step: int
    cursor: bytes
    ddp_layouts: DdpLayouts
    layout: bytes
    catalog: bytes
    training: _Flags
    # Of a DDP: whether its next forward pass gives all ranks the buffers of the first.
    syncs: _Flags
    requires_grad: _Flags
    grads: _Flags
    buffers: bytes
    optimizers: dict[str, bytes]
    objects: dict[str, bytes]
    data: dict[str, bytes]
    attributes: attributes.Saved
    extra: dict[str, bytes]
    rng: bytes
    exact: tuple[int, int] | None = None


class Draft:
    """A record that lacks what is still on its way from a device; no device was waited for."""

    def __init__(
        self,
        made: _Record,
        buffers: dict[str, torch.Tensor],
        scalers: dict[str, Any],
        objects: dict[str, Any],
        arrival: Arrival,
    ) -> None:
        self._made, self._buffers, self._scalers, self._arrival = made, buffers, scalers, arrival
        self._objects = objects

    @property
    def is_whole(self) -> bool:
        """Whether `finish` waits for nothing."""
        return not self._arrival.from_device

    @property
    def nbytes(self) -> int:
        """The size of the record so far."""
        return len(msgspec.msgpack.encode(self._made))

    def parts(self) -> dict[str, bytes]:
        """Return what the record has of the State by name, once all is there."""
        self.finish()
        made = self._made
        named = {**made.optimizers, **made.objects, **made.data, **made.extra}
        attributes_of_it = {name: codec.pack(fields) for name, (fields, _) in made.attributes.items()}
        return {
            **{f"state.{name}": packed for name, packed in named.items()},
            **{f"attributes of state.{name}": packed for name, packed in attributes_of_it.items()},
            "buffers": made.buffers,
            "the position in the data": made.cursor,
        }

    def finish(self) -> bytes:
        """Return the record once all is there. Any thread. Raises RuntimeError where a device has failed."""
        # no deadline: the device's own work; the end of the generation frees it
        self._arrival.wait()
        self._made.buffers = codec.pack(self._buffers, name="buffers")
        for name, scaler in self._scalers.items():
            self._made.objects[name] = codec.pack(private.state_dict_of(scaler), name=f"state.{name}")
        for name, value in self._objects.items():
            self._made.objects[name] = codec.pack(value, name=f"state.{name}")
        return codec.seal(msgspec.msgpack.encode(self._made), name="the record")


def draft(
    state: State,
    step: int,
    cursor: object = None,
    ddp_layouts: DdpLayouts | None = None,
    tensors: TensorSet | None = None,
    exact: tuple[int, int] | None = None,
) -> Draft:
    """Make the record of `step`, between two steps: after `optimizer.step()` (and `scaler.update()`).

    `cursor` is any plain tree; `tensors` saves a walk where it has just looked at `state`; `exact`: see
    RecordView. UsageError for what cannot be saved, with its place. What is on a device is copied behind the
    training, and completes the record later.
    """
    parts = parts_of(state)
    for name, scaler in parts.scalers.items():
        if private.scaler_busy(scaler):
            raise UsageError(f"commit after state.{name}.update(), not between step() and update()")
    parameters = [tensor for _name, tensor in every_parameter(state)]
    tensors = tensors or TensorSet(state)
    scalers, buffers, arrival = _queue_copies(state)
    states = {name: _state_of(one) for name, one in _objects(parts).items() if name not in scalers}
    objects, later, on_the_way = _objects_of(states, on_device=_is_on_device(parameters))
    made = _Record(
        step=step,
        cursor=codec.pack(cursor, name="cursor"),
        ddp_layouts=ddp_layouts or {},
        layout=tensors.planned.packed,
        catalog=tensors.catalog,
        training=_flags(module.training for _prefix, module in tree_of(state).modules()),
        syncs=_flags(private.syncs_buffers(module) for _prefix, module in tree_of(state).modules()),
        requires_grad=_flags(p.requires_grad for p in parameters),
        grads=_flags(p.grad is not None for p in parameters),
        buffers=b"",
        optimizers={
            name: codec.pack(msgspec.structs.asdict(optim.split(one)), name=f"state.{name}")
            for name, one in parts.optimizers.items()
        },
        objects=objects,
        data=parts.pack_data(),
        attributes=attributes_of(state).capture(lambda: tensors.names, states),
        extra={
            prefix: codec.pack(private.extra_state_of(module), name=f"state.{prefix}get_extra_state()")
            for prefix, module in tree_of(state).with_extra_state()
        },
        rng=codec.pack(rng.capture()),
        exact=exact,
    )
    return Draft(made, buffers, scalers, later, arrival.together(Arrival(on_the_way)))


def _is_on_device(parameters: list[torch.Tensor]) -> bool:
    return bool(parameters) and parameters[0].device.type != "cpu"


def _objects_of(
    states: dict[str, Any], *, on_device: bool
) -> tuple[dict[str, bytes], dict[str, Any], set[torch.device]]:
    """Return objects' states packed; those that are to be, once the devices have done what is queued."""
    packed, later, devices = {}, {}, set()
    for name, value in states.items():
        sent, where = codec.sent_off(value) if on_device else (value, set())
        devices |= where
        if where:
            later[name] = sent
        else:
            packed[name] = codec.pack(value, name=f"state.{name}")
    return packed, later, devices


def _queue_copies(state: State) -> tuple[dict[str, Any], dict[str, torch.Tensor], Arrival]:
    """Return of what the record has from a device copies on the CPU, and when they are there.

    The GradScalers whose state is on a device; and the buffers that have changed, of which those on the CPU
    are copied by whoever packs them.
    """
    buffers = {b.name: private.local(b.tensor).detach() for b in watch_of(state).record()}
    devices = {tensor.device for tensor in buffers.values()}
    scalers = {}
    for name, scaler in parts_of(state).scalers.items():
        if (device := private.scaler_device(scaler)) is not None:
            devices.add(device)
            scalers[name] = private.scaler_copy(scaler)
    # Of those on the CPU, too: whoever finishes the record does so while the training goes on.
    whole = devices <= {torch.device("cpu")}
    if not whole:
        buffers = {name: one.to("cpu", non_blocking=True, copy=True) for name, one in buffers.items()}
    return scalers, buffers, Arrival(devices)


def read(data: bytes | bytearray | memoryview) -> RecordView:
    """Read what a record says of itself, changing nothing; ProtocolError if it is malformed."""
    return _view(_parse(data))


def describe(data: bytes | bytearray | memoryview) -> Described:
    """Read what a record says of tensors and optimizers; ProtocolError if it is malformed."""
    record = _parse(data)
    optimizers = {name: _saved(record, name) for name in record.optimizers}
    return Described(layout.unpack(record.layout), catalog.read(record.catalog), optimizers)


def branch(mine: bytes, other: bytes | None, state: State, number: int) -> None:
    """Have this rank, which takes after the one that made `mine`, draw other numbers than that one.

    For generators that drew other numbers on the rank that made `other`, too; those that all ranks have alike
    stay. After `restore`. ProtocolError if a record is malformed.
    """
    first, second = _parse(mine), None if other is None else _parse(other)
    rng.branch(None if second is None else codec.unpack(second.rng), number)
    for name, generator in parts_of(state).generators.items():
        if second is None or first.objects[name] != second.objects.get(name):
            generator.manual_seed(
                xxhash.xxh3_64_intdigest(first.objects[name] + number.to_bytes(8, "little"))
            )


# What an object of the script's tells need not be the same each time that it is asked.
_AGAIN = ("layout", "training", "syncs", "requires_grad", "grads", "buffers", "optimizers", "data", "rng")


def differing(one: bytes, other: bytes) -> str | None:
    """Name a part in which two records of one step differ; ProtocolError if one of them is malformed."""
    first, second = _parse(one), _parse(other)
    return next((part for part in _AGAIN if getattr(first, part) != getattr(second, part)), None)


def restore(data: bytes | bytearray | memoryview, state: State) -> RecordView:
    """Put a record back into the living objects; tensors first, by `TensorSet.unpack`, where they must move.

    Gradients are dropped: set to None where there was none, to zero where there was one. ProtocolError for a
    malformed record, RecoveryError for one of another model, before anything is changed; RecoveryError also
    where the optimizer lacks a tensor that `unpack` should have brought.
    """
    record = _parse(data)
    view = _view(record)
    parts = parts_of(state)
    saved = _check_fit(record, state)
    objects = {name: codec.unpack(value) for name, value in record.objects.items()}
    plain = {name: codec.unpack(value) for name, value in record.data.items()}
    for name, scaler in parts.scalers.items():
        if private.scaler_enabled(scaler) != bool(objects[name]):
            raise RecoveryError(f"state.{name} is enabled on one side of the fault only")
    buffers = _buffers(record, state)
    generators = codec.unpack(record.rng)
    extra = {prefix: codec.unpack(value) for prefix, value in record.extra.items()}
    attributes_of(state).begin(lambda: TensorSet(state).names)

    _restore_buffers(buffers, state)
    _restore_flags(record, state)
    for prefix, module in tree_of(state).with_extra_state():
        private.load_extra_state(module, extra[prefix])
    for name, one in _objects(parts).items():
        _load(one, objects[name])
    for scaler in parts.scalers.values():
        private.scaler_clear(scaler, parts.optimizers.values())
    # After the schedulers: some write to the groups as they load.
    for name, optimizer in parts.optimizers.items():
        optim.join(name, saved[name], optimizer)
    for name, value in plain.items():
        parts.put_back(name, record.data[name], value)
    _restore_attributes(record, state)
    # Last: anything above may have drawn a number.
    rng.restore(generators)
    return view


def _parse(data: bytes | bytearray | memoryview) -> _Record:
    try:
        return msgspec.msgpack.decode(codec.unseal(data), type=_Record)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"malformed record: {error}") from error


def _view(record: _Record) -> RecordView:
    return RecordView(
        step=record.step,
        cursor=codec.unpack(record.cursor),
        ddp_layouts=record.ddp_layouts,
        layout=layout.unpack(record.layout),
        exact=record.exact,
    )


def _objects(parts: Parts) -> dict[str, Any]:
    return {**parts.stateful, **parts.scalers, **parts.generators}


def _state_of(one: Any) -> object:
    return one.get_state() if isinstance(one, torch.Generator) else private.state_dict_of(one)


def _load(one: Any, saved: Any) -> None:
    if isinstance(one, torch.Generator):
        one.set_state(saved.cpu())
        return
    one.load_state_dict(saved)


def _restore_attributes(record: _Record, state: State) -> None:
    """Restore attributes of objects, and of modules in which some other process has seen one change."""
    known, places = attributes_of(state), dict(tree_of(state).modules())
    for name, (kept, _covered) in record.attributes.items():
        if name in places:
            known.adopt(name, places[name], kept, {})
        elif name not in known.holders:
            raise RecoveryError(f"the record has attributes of {name}, which is not here")
    tensors = TensorSet(state) if known.holders else None
    if tensors is not None:
        known.restore(record.attributes, tensors.living, tensors.names)


def _check_fit(record: _Record, state: State) -> dict[str, optim.OptimizerTree]:
    parts = parts_of(state)
    pairs: list[tuple[Iterable[str], Iterable[str]]] = [
        (record.optimizers, parts.optimizers),
        (record.objects, _objects(parts)),
        (record.data, parts.data),
        (record.extra, dict(tree_of(state).with_extra_state())),
    ]
    for there, here in pairs:
        if set(there) != set(here):
            raise RecoveryError(f"the record holds {sorted(there)} where the State has {sorted(here)}")
    saved: dict[str, optim.OptimizerTree] = {}
    for name, optimizer in parts.optimizers.items():
        saved[name] = _saved(record, name)
        optim.fits(name, saved[name], optimizer)
    modules = len(tree_of(state).modules())
    parameters = sum(1 for _ in every_parameter(state))
    for flags, count in (
        (record.training, modules),
        (record.syncs, modules),
        (record.requires_grad, parameters),
        (record.grads, parameters),
    ):
        if flags.count != count or len(flags.bits) != (count + 7) // 8:
            raise RecoveryError(
                f"the record is of a model with {flags.count} modules or parameters, not {count}"
            )
    return saved


def _saved(record: _Record, name: str) -> optim.OptimizerTree:
    try:
        return msgspec.convert(codec.unpack(record.optimizers[name]), optim.OptimizerTree)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"record: the state of {name} is malformed: {error}") from error


# ---- buffers, flags and gradients


def _buffers(record: _Record, state: State) -> dict[str, torch.Tensor]:
    buffers = codec.unpack(record.buffers)
    if type(buffers) is not dict or not all(type(b) is torch.Tensor for b in buffers.values()):
        raise ProtocolError("record: the buffers are malformed")
    for name in buffers.keys() - tree_of(state).slots().keys():
        raise RecoveryError(f"the record holds the buffer {name}, which is not here")
    return buffers


def _restore_buffers(saved: dict[str, torch.Tensor], state: State) -> None:
    slots = tree_of(state).slots()
    for name, value in saved.items():
        module, key = slots[name]
        living = private.buffers_of(module)[key]
        part = private.local(living) if living is not None else None
        if part is None or part.shape != value.shape or part.dtype != value.dtype:
            private.buffers_of(module)[key] = value if part is None else value.to(part.device)
        else:
            private.copy_all([part], [value])
    watch_of(state).rebase(set(saved))


def _flags(values: Iterable[bool]) -> _Flags:
    bits = "".join("1" if value else "0" for value in values)
    number = int(bits[::-1], 2) if bits else 0
    return _Flags(len(bits), number.to_bytes((len(bits) + 7) // 8, "little"))


def _bits(flags: _Flags) -> Callable[[int], bool]:
    return lambda index: bool(flags.bits[index // 8] >> index % 8 & 1)


def _restore_flags(record: _Record, state: State) -> None:
    training, syncs = _bits(record.training), _bits(record.syncs)
    for index, (_prefix, module) in enumerate(tree_of(state).modules()):
        # Not by train(): models override it, to keep a part frozen.
        module.training = training(index)
        private.sync_buffers(module, syncs(index))
    requires_grad, grads = _bits(record.requires_grad), _bits(record.grads)
    for index, (_name, parameter) in enumerate(every_parameter(state)):
        if parameter.requires_grad != requires_grad(index):
            parameter.requires_grad_(requires_grad(index))
        # A zero gradient is not no gradient: an optimizer with momentum or decay moves a parameter for it.
        if not grads(index):
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        else:
            parameter.grad = torch.zeros_like(parameter.grad)

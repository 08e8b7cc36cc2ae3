"""Pure: what the tensors of a version are called in a state_dict, as torch's get_state_dict has them."""

import re
from collections.abc import Iterator, Sequence

from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.pytorch_hooks.state.catalog import Catalog
from ckptless.pytorch_hooks.state.layout import Layout
from ckptless.pytorch_hooks.state.optim import OptimizerTree

Path = tuple[str | int, ...]

_ITEM = re.compile(r"\[(?:(\d+)|'([^']*)')\]")


def key_of(path: Path) -> str:
    """A path as DCP flattens it."""
    return ".".join(map(str, path))


def tensor_paths(layout: Layout, catalog: Catalog, optimizers: dict[str, OptimizerTree]) -> list[Path]:
    """Return the path of each entry of a layout, in order. Raises ProtocolError if the catalog does not fit.

    Parameters and buffers are under their model by their names there, without what wrappers add to them; an
    optimizer's tensors are under its `state` by their parameter's name.
    """
    owners = {
        name: dict(zip(_places(optimizers[name]), entries, strict=False))
        for name, entries in catalog.optimizers.items()
        if name in optimizers
    }
    found: list[Path] = []
    for entry in layout.entries:
        kind, role, rest = entry.name.split(":", 2)
        try:
            if kind == "o":
                place, _, key = rest.partition(":")
                owner = parameter_name(layout.entries[owners[role][place]].name, catalog)
                found.append((*_split(role), "state", owner, *_split(key)))
            else:
                found.append((*_split(role), parameter_name(entry.name, catalog)))
        except (KeyError, IndexError) as error:
            raise ProtocolError(f"{entry.name} is of a parameter that the record does not name") from error
    return found


def parameter_name(name: str, catalog: Catalog) -> str:
    """Return the name of a parameter or buffer in its model: without the parts that wrappers add."""
    name = name[2:]
    # From within: the outer ones are the beginning of the inner ones.
    for wrapper in sorted(catalog.wrappers, key=len, reverse=True):
        if name.startswith(wrapper):
            role, _, path = wrapper.partition(":")
            outer = path[:-1].rpartition(".")[0]
            name = f"{role}:{outer}{'.' * bool(outer)}{name[len(wrapper) :]}"
    return name.partition(":")[2]


def optimizer_values(
    layout: Layout, catalog: Catalog, optimizers: dict[str, OptimizerTree]
) -> Iterator[tuple[Path, object]]:
    """Yield optimizers' groups and plain state, as get_optimizer_state_dict has them."""
    for role, saved in optimizers.items():
        entries = catalog.optimizers.get(role, ())
        names = [parameter_name(layout.entries[entry].name, catalog) for entry in entries]
        start = 0
        for number, (options, size) in enumerate(zip(saved.groups, saved.sizes, strict=True)):
            path: Path = (*_split(role), "param_groups", number)
            yield (*path, "params"), names[start : start + size]
            for key, value in options.items():
                if isinstance(key, str):
                    yield (*path, key), value
            start += size
        for index, key, value in saved.values:
            if isinstance(key, str) and isinstance(value, bool | int | float | str):
                yield (*_split(role), "state", names[index], key), value


def _places(saved: OptimizerTree) -> Sequence[str]:
    return [f"{group}.{index}" for group, size in enumerate(saved.sizes) for index in range(size)]


def _split(name: str) -> Path:
    """`model['gen']` and `old_dirs[3]` as paths."""
    head = name.partition("[")[0]
    items = _ITEM.findall(name[len(head) :])
    return (head, *(int(number) if number else word for number, word in items))

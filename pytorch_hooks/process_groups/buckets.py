"""The buckets of a state's DDP modules, which every process has the same for good."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn.parallel import DistributedDataParallel

from ckptless.pytorch_hooks.process_groups import ddp
from ckptless.pytorch_hooks.state import State
from ckptless.pytorch_hooks.state.objects import parts_of


class Buckets:
    """`layouts`: of each module by name the parameters of each bucket, once they are settled."""

    def __init__(self, state: State | None = None) -> None:
        self._modules = list(_ddp_modules(state)) if state is not None else []
        # A Reducer reduces what is trained when it is made.
        self._trained = [(p, p.requires_grad) for _name, module in self._modules for p in module.parameters()]
        self.layouts: dict[str, list[list[int]]] = {}

    def renew(self, layouts: dict[str, list[list[int]]]) -> None:
        """Put every module on the present groups, with these buckets.

        What is trained is as it was built, afterwards: the record says what is.
        """
        self.layouts = layouts
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        for name, module in self._modules:
            ddp.renew(module, layouts.get(name))

    def settle(self) -> None:
        """Fix the buckets after the first backward; a collective where something is to be done."""
        for name, module in self._modules:
            if name not in self.layouts:
                ddp.settle_buckets(module)
                layout = ddp.settled_layout(module)
                if layout is not None:
                    self.layouts[name] = layout


def _ddp_modules(state: State) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Every DDP module of a state, by name."""
    for role, module in parts_of(state).modules.items():
        for name, child in module.named_modules():
            if isinstance(child, DistributedDataParallel):
                yield f"{role}:{name}", child

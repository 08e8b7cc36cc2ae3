"""The DDP and FSDP2 modules of a State: they go on as the same objects, on renewed process groups."""

from collections.abc import Iterable

import torch

from ckptless.pytorch_hooks.state import State
from ckptless.pytorch_hooks.state.objects import parts_of
from ckptless.pytorch_hooks.torch_private import ddp as torch_ddp
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp


class Buckets:
    """The buckets of a State's DDP modules, the same in every process for good once they are settled.

    `layouts`: of each module by name the parameters of each bucket.
    """

    def __init__(self, state: State) -> None:
        self._modules = {
            f"{role}:{name}": ddp
            for role, root in parts_of(state).modules.items()
            for name, module in root.named_modules()
            if (ddp := torch_ddp.of(module)) is not None
        }
        # A Reducer reduces what is trained when it is made.
        self._frozen = [p for one in self._modules.values() for p in torch_ddp.frozen_since(one)]
        reduced = {id(p) for p in self._frozen}
        parameters = [p for one in self._modules.values() for p in one.parameters()]
        self._trained = [(p, p.requires_grad or id(p) in reduced) for p in parameters]
        self.layouts: dict[str, torch_ddp.Layout] = {}

    def renew(self, layouts: dict[str, torch_ddp.Layout]) -> None:
        """Put every module on the present groups, with these buckets.

        What is trained is as it was built, afterwards: the record says what is.
        """
        self.layouts = layouts
        for parameter, trained in self._trained:
            parameter.requires_grad_(trained)
        for name, module in self._modules.items():
            torch_ddp.renew(module, layouts.get(name))
        for frozen in self._frozen:
            frozen.requires_grad_(False)

    def settle(self) -> None:
        """Fix the buckets after the first backward; a collective where something is to be done."""
        for name, module in self._modules.items():
            if name not in self.layouts:
                torch_ddp.settle_buckets(module)
                layout = torch_ddp.settled_layout(module)
                if layout is not None:
                    self.layouts[name] = layout


class Sharded:
    """Every FSDP2 module of a state, 1-D or 2-D (HSDP), as it was when the state was built."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._pairs = torch_fsdp.states(modules)
        self._built = [torch_fsdp.switches(state) for state, _module in self._pairs]
        self._reshards = [torch_fsdp.reshards(state) for state, _module in self._pairs]

    def __len__(self) -> int:
        return len(self._pairs)

    def sums(self) -> bool:
        """Whether this torch gives the sum of gradients where their mean is asked for."""
        return any(torch_fsdp.sums(state) for state, _module in self._pairs)

    def holds_gradients(self) -> bool:
        """Whether there are gradients that are not yet reduced, and so in no parameter's `grad`."""
        return any(torch_fsdp.holds_gradients(state) for state, _module in self._pairs)

    def renew(self) -> None:
        """Back to before the iteration: parameters are shards, nothing is pending, gradients are gone.

        `set_requires_gradient_sync` and the like are as the state was built, which is what a newcomer has:
        the iteration may have ended between two micro-batches, or its first have set some for good, as
        torchtitan's loss in chunks does. Makes no collective and waits for none.
        """
        torch_fsdp.reset(self._pairs)
        for (state, _module), switches in zip(self._pairs, self._built, strict=True):
            torch_fsdp.switch(state, switches)
        for (state, _module), reshards in zip(self._pairs, self._reshards, strict=True):
            torch_fsdp.reshard(state, reshards)

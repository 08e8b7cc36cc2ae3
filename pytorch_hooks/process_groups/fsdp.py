"""FSDP2 modules that go on as the same objects, wherever in an iteration their generation ended."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp


class Sharded:
    """Every FSDP2 module of a state, 1-D or 2-D (HSDP), as it was when the state was built."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._pairs = torch_fsdp.states(modules)
        self._built = [torch_fsdp.switches(state) for state, _module in self._pairs]

    def __len__(self) -> int:
        return len(self._pairs)

    def holds_gradients(self) -> bool:
        """Whether there are gradients that are not yet reduced, and so in no parameter's `grad`."""
        return any(torch_fsdp.holds_gradients(state) for state, _module in self._pairs)

    def renew(self) -> None:
        """Back to before the iteration: parameters are shards, nothing is pending, gradients are gone.

        `set_requires_gradient_sync` and the like are as the state was built, which is what a newcomer has:
        the iteration may have ended between two micro-batches. Makes no collective and waits for none.
        """
        torch_fsdp.reset(self._pairs)
        for (state, _module), switches in zip(self._pairs, self._built, strict=True):
            torch_fsdp.switch(state, switches)

"""The hooks inside the training process: `run`, `protect`, `Run`, `State`, `Exact`."""

from ckptless.pytorch_hooks.elastic.exact import Exact
from ckptless.pytorch_hooks.running.main import protect, run
from ckptless.pytorch_hooks.running.training import Run
from ckptless.pytorch_hooks.state import State

__all__ = ["Exact", "Run", "State", "protect", "run"]

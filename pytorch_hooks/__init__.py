"""The hooks inside the training process: `run`, `Run`, `State`, `Exact`."""

from ckptless.pytorch_hooks.elastic.exact import Exact
from ckptless.pytorch_hooks.running.main import run
from ckptless.pytorch_hooks.running.training import Run
from ckptless.pytorch_hooks.state import State

__all__ = ["Exact", "Run", "State", "run"]

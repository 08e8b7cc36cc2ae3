"""What runs inside the training process: `run`, `Run`, `State`."""

from ckptless.pytorch_hooks.main import run
from ckptless.pytorch_hooks.state import State
from ckptless.pytorch_hooks.training import Run

__all__ = ["Run", "State", "run"]

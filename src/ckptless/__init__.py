"""ckptless: training that goes on when a process, a GPU or a node dies.

`ckptless.run`, `ckptless.protect`, `ckptless.Run`, `ckptless.State` and `ckptless.Exact` are what a training
script uses. They are loaded on first use, so that importing a subpackage (a daemon, `ckptctl`) never costs an
import of torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckptless.pytorch_hooks import Exact, Run, State, protect, run

__all__ = ["Exact", "Run", "State", "__version__", "protect", "run"]


def __getattr__(name: str) -> Any:
    if name in {"Exact", "Run", "State", "protect", "run"}:
        from ckptless import pytorch_hooks

        return getattr(pytorch_hooks, name)
    raise AttributeError(f"module 'ckptless' has no attribute {name!r}")

"""The state of a training job, kept bit for bit: its tensors in one buffer, the rest in a small record."""

from ckptless.pytorch_hooks.state.layout import Entry, Layout
from ckptless.pytorch_hooks.state.objects import State
from ckptless.pytorch_hooks.state.record import (
    DdpLayouts,
    Draft,
    RecordView,
    branch,
    draft,
    read,
    restore,
)
from ckptless.pytorch_hooks.state.tensors import TensorCopy, TensorSet

__all__ = [
    "DdpLayouts",
    "Draft",
    "Entry",
    "Layout",
    "RecordView",
    "State",
    "TensorCopy",
    "TensorSet",
    "branch",
    "draft",
    "read",
    "restore",
]

"""The state of a training job, kept bit for bit: its tensors in one buffer, the rest in a small record."""

from ckptless.pytorch_hooks.state.layout import Entry, Layout
from ckptless.pytorch_hooks.state.objects import State
from ckptless.pytorch_hooks.state.record import DdpLayouts, RecordView, capture, read, restore
from ckptless.pytorch_hooks.state.tensors import TensorCopy, TensorSet

__all__ = [
    "DdpLayouts",
    "Entry",
    "Layout",
    "RecordView",
    "State",
    "TensorCopy",
    "TensorSet",
    "capture",
    "read",
    "restore",
]

"""Training data: the same batches in the same order, whatever fails in between."""

from ckptless.pytorch_hooks.data.arrow import Arrow
from ckptless.pytorch_hooks.data.cache import Cache
from ckptless.pytorch_hooks.data.loader import MappedLoader
from ckptless.pytorch_hooks.data.pack import Pack
from ckptless.pytorch_hooks.data.sources import Json, JsonLines

__all__ = ["Arrow", "Cache", "Json", "JsonLines", "MappedLoader", "Pack"]

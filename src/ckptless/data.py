"""Training data: the same batches in the same order, whatever fails in between."""

from ckptless.pytorch_hooks.data import Arrow, Cache, Json, JsonLines, MappedLoader, Pack

__all__ = ["Arrow", "Cache", "Json", "JsonLines", "MappedLoader", "Pack"]

"""Bytes of tensors, both ways, without numpy."""

import ctypes

import torch

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
"""Element types that can be saved, by name. Quantised and sub-byte types are not among them."""

NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The names of `DTYPES`, by type."""


_STOCK = frozenset({torch.Tensor, torch.nn.Parameter})


def why_not(tensor: torch.Tensor) -> str | None:
    """Say what keeps a tensor (any shape, dtype, device) from being saved; None if nothing does."""
    if type(tensor) in _STOCK and tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in NAMES:
        return None
    if hasattr(tensor, "materialize"):
        return "it is not initialised yet: run one forward pass first"
    if tensor.is_meta:
        return "it is on the meta device and has no bytes"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}: only dense tensors can be saved"
    if hasattr(tensor, "__tensor_flatten__"):
        return f"it is a tensor subclass, {type(tensor).__name__}, that hides other tensors"
    if tensor.dtype not in NAMES:
        return f"its dtype is {tensor.dtype}"
    return None


def lies_here(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie on the CPU, one after the other, as they would be saved."""
    return (
        type(tensor) in _STOCK
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def window(tensor: torch.Tensor) -> memoryview:
    """Show the bytes of a contiguous CPU tensor (any shape, dtype) as a writable memoryview, without a copy.

    The memoryview does not keep the tensor's memory alive: keep the tensor as long as it is used.
    """
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Give the bytes of a dense tensor (any shape, dtype of `DTYPES`) as 1-D uint8 on the CPU, row-major.

    No copy where it lies there like that.
    """
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Copy out the bytes of a dense tensor (any shape, dtype of `DTYPES`, device), in row-major order."""
    if lies_here(tensor):
        # Of a small tensor half a dozen operations take longer than its bytes.
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return bytes(window(plain))


def from_bytes(data: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Make a CPU tensor of `shape` and `dtype` from exactly as many bytes as it has; it owns its memory."""
    tensor = torch.empty(shape, dtype=dtype)
    window(tensor)[:] = data
    return tensor

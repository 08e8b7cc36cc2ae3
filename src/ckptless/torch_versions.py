"""The releases of torch and NCCL that each part is made for; known without importing either."""

import re
from typing import TypeAlias

Version: TypeAlias = tuple[int, ...]

# Recovery in place, FSDP2 and saving stand on private parts of torch; each is looked for before it is used.
OLDEST = (2, 8)
NEWEST = (2, 15)
# From here on a stock process group can have a backend that is written in Python.
OLDEST_PYTHON_BACKEND = (2, 14)
# ProcessGroupNCCL asks the store for every id, if told so by TORCH_NCCL_RANKS_PER_ROOT.
OLDEST_SCALABLE_TORCH = (2, 7)
OLDEST_SCALABLE_NCCL = (2, 23)
# From here on "nccl" makes groups of another kind (nccl2), but where TORCH_DIST_USE_NCCL2 is 0.
OLDEST_NCCL2_TORCH = (2, 15)
# An id holds a magic; before that only an address.
OLDEST_NCCL = (2, 16)


def parse(text: str) -> Version:
    """The numbers that a version begins with: (2, 13, 0) of "2.13.0+cpu". Raises ValueError for none."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    if not numbers:
        raise ValueError(f"{text[:40]!r} is no version, such as 2.13.0")
    return tuple(numbers)


def is_tested(text: str) -> bool:
    """Whether this is a release, as PyPI or PyTorch's own index has it, of a torch that was tested.

    A build of somebody else's, or of a day between two releases, may be anything.
    """
    release = re.fullmatch(r"\d+\.\d+\.\d+(\+(cpu|xpu|cu\d+|rocm[\d.]+))?", text)
    return release is not None and OLDEST <= parse(text)[:2] <= NEWEST


def shown(version: Version) -> str:
    """Return a version as people write it."""
    return ".".join(map(str, version))

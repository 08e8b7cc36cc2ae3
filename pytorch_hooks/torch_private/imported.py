"""Functions of torch.distributed that modules have imported by name, found when this is imported.

Where ranks are forked that is before, once for all of them: to look at 1,000 modules takes a fork 60 to 230
ms on busy cores, since it gets pages of its own for all whose references it counts.
"""

import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch.distributed import distributed_c10d as c10d

# What may be answered in torch's place.
ANSWERED = (
    *("init_process_group", "destroy_process_group", "_new_group_with_tag", "get_backend"),
    "get_backend_config",
)


def _named(names: Iterable[str], functions: Collection[int]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where modules of these names that are not torch's have functions of it (by id) by name."""
    for name in names:
        if name.partition(".")[0] not in ("torch", "ckptless"):
            # Some make their attributes as they are asked for.
            own = getattr(sys.modules.get(name), "__dict__", {})
            yield from ((own, key) for key, value in list(own.items()) if id(value) in functions)


_STOCK = {id(getattr(c10d, name)) for name in ANSWERED}
_FOUND = [*_named(list(sys.modules), _STOCK)]
# Newer modules come behind it.
_LAST = next(reversed(sys.modules))


def replace(replaced: Mapping[int, Callable[..., Any]]) -> None:
    """Have modules that are not torch's have the others in place of torch's, which `replaced` names by id."""
    # At once, for any thread may import: no line of Python runs in it.
    newer = list(itertools.takewhile(_LAST.__ne__, reversed(sys.modules)))
    # The script itself is in the place that the zygote's own program had.
    for own, key in (*_FOUND, *_named(("__main__", *newer), replaced)):
        if (other := replaced.get(id(own.get(key)))) is not None:
            own[key] = other

"""A script whose NCCL nobody knows yet, as far as agents can see: `future_nccl.py OUT [hooked]`.

It asks the store for ids as torch does. Where they are computed, it checks in with a length that is not
known, and waits for its answer as NCCL does, for good; "hooked": inside of a training function.
"""

import json
import os
import socket
import struct
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

DEADLINE_S = 60.0


def main(out: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deadline = timedelta(seconds=DEADLINE_S)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Any = TCPStore(address, port, None, False, deadline, wait_for_workers=False)
    ranks_per_root = os.environ["TORCH_NCCL_RANKS_PER_ROOT"]
    # With 128 torch does this for larger jobs only; what stands in the store is of interest here.
    roots = size if int(ranks_per_root) >= size else -(-size // int(ranks_per_root))
    keys = [f"UniqueNCCLID:{root}" for root in range(roots)]
    if rank < roots:
        store.set(keys[rank], bytes([rank]) * 128)
    ids = [bytes(data) for data in store.multi_get(keys)]
    told = {"ids": [data.hex() for data in ids], "comm_id": os.environ.get("NCCL_COMM_ID")}
    (out / f"rank-{rank}-{ranks_per_root}.json").write_text(json.dumps(told))
    if ranks_per_root == "1":
        check_in(ids[rank])


def check_in(unique_id: bytes) -> None:
    magic, _, port = *struct.unpack_from("<QH", unique_id), int.from_bytes(unique_id[10:12], "big")
    host = socket.inet_ntoa(unique_id[12:16])
    with socket.create_server((host, 0)) as answers:
        with socket.create_connection((host, port), timeout=DEADLINE_S) as connection:
            connection.sendall(struct.pack("<QIi", magic, 1, 192) + bytes(192))
        answers.accept()
    raise RuntimeError("it was answered")


if __name__ == "__main__":
    if sys.argv[2:] == ["hooked"]:
        import ckptless

        ckptless.run(lambda _: main(Path(sys.argv[1])))
    else:
        main(Path(sys.argv[1]))

"""What `stock_rank.py` needs to know of a stock libnccl: `record.py LIBRARY...` (takes gdb and readelf).

The wheels have symbols and debugging information: where functions begin, and where fields of a communicator
lie. One line for each version (the name of the library's folder) goes into recorded.json.
"""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

RECORDED = Path(__file__).with_name("recorded.json")
FUNCTIONS = {
    "ncclGetVersion": "ncclGetVersion",
    "bootstrapNetInit": "_Z16bootstrapNetInitv",
    "bootstrapInit": r"_Z13bootstrapInit\w+",
    "bootstrapAllGather": "_Z18bootstrapAllGatherPvS_i",
    "bootstrapSend": "_Z13bootstrapSendPviiS_i",
    "bootstrapRecv": "_Z13bootstrapRecvPviiS_i",
    "bootstrapSplit": r"_Z14bootstrapSplit\w+",
}
FIELDS = ("rank", "nRanks", "magic", "abortFlag", "bootstrap", "sharedRes")
SIZES = {
    "comm": "struct ncclComm",
    "shared": "struct ncclSharedResources",
    "check_in": "struct extInfo",
    "handle": "struct ncclBootstrapHandle",
}


def _symbols(library: Path) -> dict[str, int]:
    table = subprocess.run(["readelf", "-sW", library], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in table.splitlines() if " FUNC " in line]
    found = {}
    for name, pattern in FUNCTIONS.items():
        addresses = {int(row[1], 16) for row in rows if re.fullmatch(pattern, row[7].split("@")[0])}
        (found[name],) = addresses
    return found


def _fields(library: Path) -> dict[str, int]:
    # The line makes gdb read the unit that knows these types.
    commands = ["list bootstrapInit"]
    commands += [f'printf "{f} %ld\\n", (long)&((struct ncclComm*)0)->{f}' for f in FIELDS]
    commands += [f'printf "sizeof_{n} %ld\\n", (long)sizeof({t})' for n, t in SIZES.items()]
    arguments = [part for command in commands for part in ("-ex", command)]
    gdb = ["gdb", "-q", "-batch", "-nx", *arguments, str(library)]
    # It ends with 1, since it has no source to list.
    text = subprocess.run(gdb, capture_output=True, text=True, check=False).stdout
    found = {name: int(value) for name, value in re.findall(r"^(\w+) (-?\d+)$", text, re.MULTILINE)}
    missing = {*FIELDS, *(f"sizeof_{name}" for name in SIZES)} - found.keys()
    if missing:
        raise SystemExit(f"{library}: gdb does not find {missing}")
    return found


def main(libraries: list[Path]) -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for library in libraries:
        with library.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        version = library.parent.name
        recorded[version] = {"sha256": digest, "at": _symbols(library), "in": _fields(library)}
        print(version, recorded[version]["in"])
    ordered = sorted(recorded, key=lambda version: [int(part) for part in version.split(".")])
    lines = ",\n".join(f'  "{version}": {json.dumps(recorded[version])}' for version in ordered)
    RECORDED.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])

"""Build the simulated device's extension module with plain g++, once for each torch and state of sources."""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent / "csrc"
OUTPUT = Path(__file__).parents[2] / "build" / "simdev"
EXTENSION = "simdev_ext"
JOBS = 2
COMPILE = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-D_GLIBCXX_USE_CXX11_ABI=1")


def compiler() -> str | None:
    """Return the C++ compiler there is, if any."""
    return shutil.which(os.environ.get("CXX", "g++"))


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("simdev needs torch")
    return Path(spec.origin).parent


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr((COMPILE, sys.version_info[:2])).encode())
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def target() -> Path:
    """Return the extension module that the sources as they are now are built into."""
    version = importlib.metadata.version("torch")
    return OUTPUT / f"{version}-{_digest(list(SOURCES.iterdir()))}" / "simdev_ext.so"


def build() -> Path:
    """Return the extension module, built first where it is not there yet."""
    module = target()
    if module.exists():
        return module
    OUTPUT.mkdir(parents=True, exist_ok=True)
    with (OUTPUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        module = target()
        if not module.exists():
            _build(module)
    return module


def _build(module: Path) -> None:
    sources = sorted(SOURCES.glob("*.cpp"))
    with ThreadPoolExecutor(JOBS) as pool:
        objects = list(pool.map(_compile, sources))
    library = torch_folder() / "lib"
    with tempfile.TemporaryDirectory(dir=OUTPUT) as scratch:
        built = Path(scratch) / module.name
        torch = [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        _run(["-shared", "-o", str(built), *map(str, objects), *torch, "-lpthread"])
        module.parent.mkdir(exist_ok=True)
        built.rename(module)


def _compile(source: Path) -> Path:
    """Return the object file of one source file, kept while it and the headers beside it stay as they are."""
    folder = OUTPUT / f"{importlib.metadata.version('torch')}-objects"
    folder.mkdir(exist_ok=True)
    kept = folder / f"{source.stem}-{_digest([source, *SOURCES.glob('*.h')])}.o"
    if not kept.exists():
        include = torch_folder() / "include"
        roots = [include, include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
        scratch = kept.with_suffix(f".{os.getpid()}")
        paths = [part for root in roots for part in ("-isystem", str(root))]
        _run([*COMPILE, *paths, "-c", str(source), "-o", str(scratch)])
        scratch.rename(kept)
    return kept


def _run(arguments: list[str]) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("simdev needs a C++ compiler: g++ is not there")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    if done.stderr:
        sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(f"simdev: {' '.join([found, *arguments])} failed:\n{done.stderr}")


def load_extension() -> ModuleType:
    """Return the extension module, built first where it has to be."""
    if EXTENSION in sys.modules:
        return sys.modules[EXTENSION]
    spec = importlib.util.spec_from_file_location(EXTENSION, build())
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {EXTENSION}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[EXTENSION] = module
    return module


if __name__ == "__main__":
    print(build())

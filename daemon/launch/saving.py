"""Where a run saves its steps, and which saved step it goes on from."""

import logging
from collections.abc import Mapping
from pathlib import Path

from ckptless.daemon.api import saved
from ckptless.daemon.api.errors import ProtocolError, UsageError
from ckptless.daemon.api.saving import SaveConfig

logger = logging.getLogger(__name__)

KEEP = 3


def save_config(options: Mapping[str, object], world_size: int) -> SaveConfig | None:
    """By --save-dir and what belongs to it; None without. Raises UsageError."""
    directory, every, keep = (options.get(name) for name in ("save_dir", "save_every", "save_total_limit"))
    if not isinstance(directory, Path):
        if every or keep:
            raise UsageError("--save-every and --save-total-limit need --save-dir")
        return None
    directory = directory.absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = newest(directory, world_size)
    except OSError as error:
        raise UsageError(f"--save-dir {directory}: {error.strerror}") from error
    if found is not None:
        logger.warning("going on from %s", found)
    return SaveConfig(
        directory=str(directory),
        every=every if isinstance(every, int) else 0,
        keep=keep if isinstance(keep, int) else KEEP,
        resume=str(found or ""),
    )


def saved_step(config: SaveConfig | None) -> int | None:
    """The step that is gone on from, where memory has no newer one."""
    return saved.step_of(Path(config.resume)) if config is not None and config.resume else None


def newest(directory: Path, world_size: int) -> Path | None:
    """The newest saved step that is whole. Raises UsageError where it is another world's, OSError."""
    for _step, folder in saved.steps_in(directory):
        try:
            manifest = saved.read_manifest(folder)
        except (ProtocolError, FileNotFoundError) as error:
            logger.warning("%s is not used: %s", folder, error)
            continue
        if manifest.world_size != world_size:
            raise UsageError(
                f"{folder} is of {manifest.world_size} ranks and this run has {world_size}: "
                "load it with torch.distributed.checkpoint, or give another --save-dir"
            )
        return folder
    return None

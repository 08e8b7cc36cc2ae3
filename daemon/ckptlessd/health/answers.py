"""Pure: what a probe has answered, as it may be shown; whatever is none of it is a failure, in words."""

from collections.abc import Sequence

from ckptless.daemon.ckptlessd.health.meanings import is_code
from ckptless.daemon.ckptlessd.health.probe import Finding
from ckptless.daemon.protocol.health import MAX_CODE, MAX_EVIDENCE, MAX_WHERE
from ckptless.daemon.protocol.limits import one_line

MOST_FINDINGS = 1000


class ProbeError(Exception):
    """A probe has raised, or told nonsense; the text says what, in one line."""


def in_words(error: BaseException) -> str:
    """Return what somebody else's code has raised, in a line."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  (somebody else's __str__)
        text = type(error).__name__
    return _line(text, MAX_EVIDENCE)


def words(missing: object) -> str:
    """Return what a node lacks, as it may be shown. Raises ProbeError for what is no text."""
    if not isinstance(missing, str):
        raise ProbeError(f"it must say in words what is missing, and returned a {type(missing).__name__}")
    return _line(missing, MAX_EVIDENCE)


def checked(found: object) -> list[Finding]:
    """Return what a probe has found, as it may be shown. Raises ProbeError for what is no finding."""
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) > MOST_FINDINGS:
        raise ProbeError(
            f"it must return up to {MOST_FINDINGS} findings, and returned {type(found).__name__}"
        )
    fine: list[Finding] = []
    for one in found:
        texts = (one.code, one.where, one.evidence) if isinstance(one, Finding) else (one,)
        if len(texts) != 3 or not all(isinstance(text, str) for text in texts):
            raise ProbeError(f"it returned a {type(one).__name__}, which is no finding")
        if not is_code(one.code) and not (one.code.isascii() and one.code.replace("-", "").isalnum()):
            raise ProbeError(f"{one.code[:MAX_CODE]!r} is no code: use letters, digits and hyphens")
        fine.append(
            Finding(
                code=one.code[:MAX_CODE],
                where=_line(one.where, MAX_WHERE),
                evidence=_line(one.evidence, MAX_EVIDENCE),
            )
        )
    return fine


def _line(text: str, limit: int) -> str:
    return one_line(text[:limit])[:limit]

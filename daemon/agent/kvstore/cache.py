"""Values that other agents keep and have let this one remember, until they say that one changes. Pure."""

MAX_NBYTES = 256 << 20


class Cache:
    """What its owner believes to be here may be missing, but what is here is what its owner has."""

    def __init__(self, max_nbytes: int = MAX_NBYTES) -> None:
        self._values: dict[int, dict[bytes, bytes]] = {}
        self._left_nbytes = max_nbytes

    def put(self, owner: int, key: bytes, value: bytes) -> None:
        """Remember, if there is room."""
        values = self._values.setdefault(owner, {})
        size = len(key) + len(value)
        if key not in values and size <= self._left_nbytes:
            values[key] = value
            self._left_nbytes -= size

    def get(self, owner: int, key: bytes) -> bytes | None:
        """The value, None where it is not here."""
        values = self._values.get(owner)
        return values.get(key) if values is not None else None

    def drop(self, owner: int, key: bytes) -> None:
        """It is about to change."""
        value = self._values.get(owner, {}).pop(key, None)
        if value is not None:
            self._left_nbytes += len(key) + len(value)

    def drop_owner(self, owner: int) -> None:
        """Nobody will say any more when one of its values changes."""
        for key, value in self._values.pop(owner, {}).items():
            self._left_nbytes += len(key) + len(value)

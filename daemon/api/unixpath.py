"""Names of Unix sockets: a path, or "@name" for Linux's abstract namespace, which leaves no file behind."""


def unix_address(name: str) -> str:
    """What bind(2) and connect(2) take for `name` (unix(7): an abstract name begins with a zero byte)."""
    return "\0" + name[1:] if name.startswith("@") else name


def is_abstract(name: str) -> bool:
    """Whether there is no file to remove or to protect."""
    return name.startswith("@")

"""`bruno demo`."""


def demo() -> None:
    """To come."""

"""The four jobs of one density: more of the same, which class, which is odd, what fits; and the analyses."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # how much is done, of how much

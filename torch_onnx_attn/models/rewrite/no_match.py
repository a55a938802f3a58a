"""The exception that carries why something is not attention, or cannot be shown to be."""

from __future__ import annotations

__all__ = ["NoMatch"]


class NoMatch(Exception):  # noqa: N818  (it is an answer, not an error)
    """Why a candidate stays as it is: a clause, such as "its axis is 1, not the last". `depth` counts the steps understood before."""

    def __init__(self, reason: str, depth: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.depth = depth

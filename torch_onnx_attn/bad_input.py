"""The error for files and arguments that people bring: its message is one sentence to show as it is."""

from __future__ import annotations

__all__ = ["BadInput"]


class BadInput(ValueError):  # noqa: N818  (it is the input that is at fault, and the command line says nothing but the message)
    """A file or argument that cannot be used. The message names it, says what is wrong and what would do. Exit code 2."""

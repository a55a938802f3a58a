"""The error for files and arguments that people bring: its message is one sentence to show as it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["BadInput", "check_writable", "first_line", "writing"]


class BadInput(ValueError):  # noqa: N818  (it is the input that is at fault, and the command line says nothing but the message)
    """A file or argument that cannot be used. The message names it, says what is wrong and what would do. Exit code 2."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_writable(path: str | os.PathLike[str]) -> None:
    """Says before long work that its result could not be written. Raises BadInput."""
    file = Path(path)
    if file.is_dir():
        raise BadInput(f"{path}: is a folder" if os.fspath(path) else "an empty file name cannot be written to")
    if not file.parent.is_dir():
        raise BadInput(f"{path}: its folder does not exist")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise BadInput(f"{path}: cannot be written to" if file.exists() else f"{path}: its folder cannot be written to")


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around the writing of a file: what the system has against it becomes a BadInput."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror or error}") from error

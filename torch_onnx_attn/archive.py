"""Reads .npz files that people bring, without trusting them."""

from __future__ import annotations

import os
from typing import Any

from .bad_input import BadInput

__all__ = ["read_archive"]


def read_archive(path: str | os.PathLike[str], expected: str) -> dict[str, Any]:
    """The arrays of an .npz file by their names. Pickled objects are refused.

    Args:
        path: the file.
        expected: what the file should be, for the error, such as ``"a recorded call"``.

    Raises:
        BadInput: there is no such file, or it is damaged, or holds something else than arrays.
    """
    import numpy

    try:
        with numpy.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise BadInput(f"{path}: there is no such file") from error
    except MemoryError as error:
        raise BadInput(f"{path}: holds an array that does not fit into memory") from error
    except Exception as error:  # a damaged archive fails in zipfile, zlib, struct or numpy, each with errors of its own
        raise BadInput(f"{path}: is not {expected}, or is damaged") from error
    others = [name for name, array in arrays.items() if not isinstance(array, numpy.ndarray)]  # members that are no .npy are bytes
    if others:
        raise BadInput(f"{path}: is not {expected}: {others[0]!r} is no array")
    return arrays

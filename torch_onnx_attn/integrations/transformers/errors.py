"""The one error of this bridge."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """A model, or an argument of its attention calls, that the ops cannot serve. The message names it and the way out."""

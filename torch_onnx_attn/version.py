"""The version of the package, here and nowhere else: setuptools reads this file without importing it."""

__version__ = "0.1.0"

"""PyGraph's version, which is part of the keys of files on disk."""

__version__ = "0.11.0"

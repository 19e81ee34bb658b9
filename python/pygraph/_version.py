"""PyGraph's version, which is part of what is remembered on disk."""

__version__ = "0.11.0"

"""Graphs of any callable: ``pygraph.graph``."""

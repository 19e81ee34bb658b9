"""Compares replays with the uncaptured run, before a graph is used and later."""

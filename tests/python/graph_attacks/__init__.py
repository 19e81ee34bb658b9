"""Attacks on ``pygraph.graph``. Those that succeed are expected to fail (docs/roadmap.md)."""

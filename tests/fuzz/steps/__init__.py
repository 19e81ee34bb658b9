"""Random training loops, with and without ``pygraph.graph``, on the CPU (loops.py)."""

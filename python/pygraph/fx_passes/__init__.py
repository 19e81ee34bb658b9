"""CUDA-graph-aware code transformations: rewrites of an FX graph that let more of it be captured, where
that provably changes no result. docs/explanation/transformations.md lists them.

They run on Inductor's post-grad graph, which is decomposed and shared by forward and backward. Most
of its nodes are functional, but it also has nodes that write to memory: nothing that reads memory is
moved past a node that writes it, and a copy that the caller can write to keeps memory of its own
(:mod:`.aliases`). The transformation ``library_functions`` comes before there is a graph:
:mod:`pygraph.polyfills`.
"""

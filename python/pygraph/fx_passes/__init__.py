"""CUDA-graph-aware code transformations: rewrites of an FX graph that let more of it be captured.

A capture cannot hold what happens on the CPU, such as a copy from a CPU tensor. Inductor would cut the
program there. Each transformation removes one reason for cuts where that provably changes no result:

    cpu_scalars   0-d CPU tensors (Python and NumPy numbers that vary, too) go to the GPU, all in one
                  asynchronous copy before the graph; every call reads their values again
    cpu_tensors   CPU tensors that GPU code uses, and cheap exact CPU operations on them, likewise
    constants     constants made on the CPU for the GPU are made there
    cpu_outputs   copies to the CPU that only the caller sees come after all GPU work

They run on Inductor's post-grad graph, which is decomposed and shared by forward and backward. Most
of its nodes are functional, but it also has nodes that write to memory: nothing that reads memory is
moved past a node that writes it, and a copy that the caller can write to keeps memory of its own
(:mod:`.aliases`). A fifth, ``library_functions``, comes before there is a graph:
:mod:`pygraph.polyfills`.
"""

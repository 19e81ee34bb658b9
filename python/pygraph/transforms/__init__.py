"""CUDA-graph-aware code transformations: rewrites of an FX graph that let more of it be captured.

A capture cannot hold what happens on the CPU: a CPU tensor as an operand, a copy between CPU and GPU, a
branch. Inductor would cut the program there. Each transformation removes one reason for cuts where
that provably changes no result:

    cpu_scalars   0-d CPU tensors (Python and NumPy numbers that vary, too) go to the GPU, all in one
                  asynchronous copy before the graph; every call reads their values anew
    cpu_tensors   CPU tensors that GPU code uses, and cheap exact CPU operations on them, likewise
    constants     constants made on the CPU for the GPU are made there
    cpu_outputs   copies to the CPU that only the caller sees come after all GPU work
    conditionals  both branches of a small pure torch.cond are computed, and one is chosen

They run on Inductor's post-grad graph: functional, decomposed, shared by forward and backward. A sixth,
``library_functions``, comes before there is a graph: :mod:`pygraph.substitutes`.
"""

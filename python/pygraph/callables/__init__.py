"""Graphs of any callable: ``pygraph.graph``. docs/explanation/whole-steps.md explains the approach.

A call passes through these modules, in this order:

    graph                ``pygraph.graph``: takes the options
    graphed              what it returns: selects the variant that serves a call
    serving, signature   whether this thread may use graphs now; the arguments, as a key and tensors
    host/                what Python can read on the host: has any of it changed?
    variant              calls of one kind, in one state of the host: observed, then given a partition
    refused_calls        which calls run uncaptured from now on, and why
    known_call           what the engine is told, to serve the next calls of a kind without Python

An observed call runs uncaptured and shows whether the callable can have a graph:

    observed_call        makes the call and finds what it used and changed (observation)
    refusals             why there can be no graph
    used_gradients       gradients from before that it uses: where they lie, which of them it writes

Then the callable becomes the function of a partition, which records and replays it:

    step_function        the callable as a function of tensors (surroundings: those that are not passed)
    forward_function     the same for a callable inside of a differentiated program
    graphed_gradient     its one node in the program's autograd graph
    inference_results    results whose inference mode is not the one of the call
    saved_tensors        where the tensors lie that autograd saved (argument_aliases: rehearsals)
    kept_graph           autograd's graph of a run, without the memory that the run used
    backward_function    runs the kept graph: partitions for the backward

Optimizers: optimizer_forms (which of them a graph can hold), rates and rate_probe (learning rates that
may move). ``pygraph.check``: check.

Plain loops: trained (the parameters of compiled programs), route (from a function of PyTorch's to its
graph), optimizer_steps (``optimizer.step()``), gradient_clips (``clip_grad_norm_``).
"""

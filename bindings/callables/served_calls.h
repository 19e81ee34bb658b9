// Calls of a graphed callable that a graph serves, without Python.
//
// Which calls a graph serves is defined in Python (python/pygraph/callables/graphed.py, variant.py,
// step_function.py). What these ask at each call is compared by the engine in any case, but the
// Python between the comparisons takes as long as they do. So calls like one that a graph has
// served are made here. Everything is asked that Python would ask, and a call is left to Python if
// any answer is another one, or if the graph does not serve it. Nothing has been done then.
//
// With PYGRAPH_SHORT_CHECKS=0 all calls are left to Python.
#pragma once

#include <pybind11/pybind11.h>

namespace pygraph::bindings {

// Makes a callable object for one graphed callable. Called with its arguments, a tuple and a
// dictionary, it returns the result in a tuple, or None for a call that is left to Python. Raises
// what the call raises. To be used with Python's lock; thread-safe with it.
//
// `inside`: serving.inside; its `is_calling` is true during a call, and `is_made` after a
// replay. `own`: has the thread's lock, `lock`, which is held during a call.
// `variables`: of Python's modules, with which calls may be served: tuples of a namespace, a name,
// and a number, or None for an empty dictionary. `transform`: a function that returns None where no
// transform of torch.func is under way.
pybind11::object make_served_calls(const pybind11::object& inside, const pybind11::object& own,
                                   const pybind11::list& variables,
                                   const pybind11::object& transform);

// Makes calls of this kind (python/pygraph/callables/known_call.py) known, in front of the others.
// Throws std::invalid_argument.
void add_known_call(pybind11::handle served, const pybind11::dict& kind);
// Forgets those of this owner; None: all.
void forget_known_calls(pybind11::handle served, pybind11::handle owner);

// How many calls have been served since this was asked last.
uint64_t take_served_count(pybind11::handle served);

}  // namespace pygraph::bindings

"""Python code that runs while the engine allocates or frees memory, and captures of other threads."""

from __future__ import annotations

import sys

import pytest
import torch

from .held_blocks_programs import run_program

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


_OUT_OF_MEMORY_IN_A_WORKSPACE = """
other, y = warmed_up(other_step)
graphed, x = warmed_up(step)
assert is_in_use()
expected = step(x)
gc.collect()
gc.disable()
if {is_garbage}:
    cycle = [other]
    cycle.append(cycle)
    del other, cycle
seen = []
def observer(*what):
    if not seen:
        seen.append(what)
        {action}
torch._C._cuda_attach_out_of_memory_observer(observer)
runtime.release_workspaces()
torch.cuda.synchronize()
torch.cuda.empty_cache()
limit_to(torch.cuda.memory_reserved() + PART)
try:
    graphed(x)  # its workspace finds no memory; nor does the uncaptured call
except torch.OutOfMemoryError:
    say("out of memory")
assert seen
gc.enable()
torch.cuda.set_per_process_memory_fraction(1.0)
for _ in range(4):
    assert_same(graphed(x), expected)
{check}
say("done")
"""


_WITH_A_TRANSFORM = """
plain = step
def step(x):
    return plain(x) + torch.fft.rfft(x[: 1 << 18]).abs().sum()
"""


@pytest.mark.parametrize("action", ["gc.collect()", "pygraph.reset()"])
def test_an_observer_of_memory_that_ends_graphs(action: str) -> None:
    """PyTorch calls it, in Python, while the launch has the graph's and the workspace's locks. Another
    graph of the stream that ends there needs the workspace's."""
    run_program(
        _OUT_OF_MEMORY_IN_A_WORKSPACE.format(
            is_garbage=action == "gc.collect()", action=action, check=""
        )
    )


def test_an_observer_of_memory_that_drops_plans_of_fourier_transforms() -> None:
    """To make room. The launch of a graph with such plans keeps others from dropping them."""
    program = _OUT_OF_MEMORY_IN_A_WORKSPACE.format(
        is_garbage=False, action="torch.backends.cuda.cufft_plan_cache.clear()", check=""
    )
    run_program(_WITH_A_TRANSFORM + program)


def test_an_observer_of_memory_that_calls_the_function() -> None:
    action = "torch.cuda.set_per_process_memory_fraction(1.0); graphed(x)"
    run_program(_OUT_OF_MEMORY_IN_A_WORKSPACE.format(is_garbage=False, action=action, check=""))


def test_an_observer_of_memory_that_raises_costs_no_graph() -> None:
    run_program(
        _OUT_OF_MEMORY_IN_A_WORKSPACE.format(
            is_garbage=False,
            action="raise ZeroDivisionError('of the observer')",
            check="assert not refusals(), refusals()",
        )
    )


_FINALIZERS = """
other, y = warmed_up(other_step)
kept = [e.graph for p in runtime.all_partitions() for e in p.entries.values() if e.graph]
assert len(kept) == 1
pygraph.reset()
del other, y
gc.collect()
graphed, x = warmed_up(step)
assert is_in_use()
expected = step(x)
assert_same(graphed(x), expected)
torch.cuda.synchronize()
drop = runtime.engine().drop_blocks
{begin}
gc.collect()
gc.disable()

class Owner:
    pass

owner = Owner()  # of the youngest generation
owner.graph = kept.pop()
owner.itself = owner


def deep(n):
    global owner
    if n:
        return deep(n - 1)
    del owner
    (0,)
    {arm}
    drop(0)
    gc.disable()

deep(30)
say("dropped")
{end}
gc.set_threshold(700, 10, 10)
gc.enable()
gc.collect()
for _ in range(3):
    assert_same(graphed(x), expected)
say("done")
"""


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="later, garbage is collected between instructions only"
)
def test_garbage_that_is_collected_while_history_is_recorded() -> None:
    """The history of memory has Python's frames, which are objects: making them may collect garbage, a
    graph of the same stream among it, while blocks are dropped under the workspace's lock."""
    run_program(
        _FINALIZERS.format(
            begin="torch.cuda.memory._record_memory_history(stacks='python')",
            arm="gc.set_threshold(1, 1000000, 1000000); junk = [[] for _ in range(9)]; gc.enable()",
            end="torch.cuda.memory._record_memory_history(enabled=None)",
        )
    )


def test_garbage_that_is_collected_in_a_trace_of_memory() -> None:
    """PyTorch's GPU trace (its CUDA sanitizer) calls Python when memory is freed."""
    pytest.importorskip("torch.cuda._gpu_trace")
    run_program(
        _FINALIZERS.format(
            begin="""
from torch.cuda import _gpu_trace
armed = []
def freed(*what):
    if armed:
        armed.clear()
        gc.collect()
_gpu_trace.register_callback_for_memory_deallocation(freed)
torch._C._activate_gpu_trace()
""",
            arm="armed.append(1)",
            end="assert not armed",
        )
    )


def test_a_process_that_has_made_another_interpreter() -> None:
    """From then on PyGILState_Check() says that every thread has Python's lock."""
    run_program("""
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
made = interpreters.create()
graphed, x = warmed_up(step)
assert is_in_use()
expected = step(x)
for _ in range(40):
    graphed(x)
assert_same(graphed(x), expected)
runtime.engine().drop_blocks(0)
assert_same(graphed(x), expected)
interpreters.destroy(made)
say("done")
""")


_CAPTURES = """
graphed, x = warmed_up(step)
assert is_in_use()
expected = step(x)
(row,) = captured()
z = torch.ones(1000, device="cuda")
side = torch.cuda.Stream()

def beside_a_capture(work):
    "Whether the capture is sound."
    begun, may_end, errors, made = threading.Event(), threading.Event(), [], []
    def capture():
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                y = torch.sin(z)
                begun.set()
                may_end.wait(20)
                y = y * 2
            made.append((graph, y))
        except BaseException as error:
            errors.append(error)
            begun.set()
    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(20)
    try:
        work()
    finally:
        may_end.set()
        thread.join()
    if errors:
        say("capture failed:", str(errors[0]).splitlines()[0])
        return False
    ((graph, y),) = made
    graph.replay()
    torch.cuda.synchronize()
    assert_same(y, torch.sin(z) * 2)
    return True

results = []
def replay():
    for _ in range(3):
        results.append(graphed(x))
if not beside_a_capture(replay):
    say("replays are impossible beside captures")
    say("done")
    sys.exit()
assert_same(results[-1], expected)

torch.cuda.synchronize()
torch.cuda.empty_cache()
filler = torch.empty(6 * INTERNAL, dtype=torch.uint8, device="cuda")
kept = []
def again():
    global filler
    del filler  # free, in the cache: more than enough for a launch, or an uncaptured call
    runtime.release_workspaces()
    kept.append(torch.empty(row.workspace_bytes, dtype=torch.uint8, device="cuda"))
    results.append({call})
say("sound" if beside_a_capture(again) else "broken")
assert_same(results[-1], expected)
say("done")
"""


def test_a_capture_of_another_thread_survives_a_workspace_that_is_allocated_again() -> None:
    """All memory that the launch needs is in the allocator's cache. A search for a segment of its own
    asks the driver, which ends a capture of another thread."""
    plain = run_program(_CAPTURES.format(call="step(x)"))
    if "sound" not in plain:
        pytest.skip("so does an uncaptured call")
    assert "sound" in run_program(_CAPTURES.format(call="graphed(x)"))

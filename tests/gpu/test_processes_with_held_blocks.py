"""Processes that fork, or end, while graphs hold blocks."""

from __future__ import annotations

import pytest
import torch

from .held_blocks_programs import run_program

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


_FORKS = """
other, y = warmed_up(other_step)
graphed, x = warmed_up(step)
assert is_in_use()
expected = step(x)
torch.cuda.synchronize()
call = {call}
stop = threading.Event()
def run():
    while not stop.is_set():
        call(x)
thread = threading.Thread(target=run)
thread.start()
time.sleep(0.3)
hung = 0
for _ in range(6):
    child = os.fork()
    if child == 0:
        try:
            {end_of_child}
            gc.collect()
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.01)
    else:
        hung += 1
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        break
stop.set()
thread.join()
assert_same(graphed(x), expected)
say("hung", hung)
say("done")
"""


def test_children_that_are_forked_while_another_thread_replays() -> None:
    """They may drop graphs (footgun 27). The thread waits in a launch most of the time, with locks that
    the child inherits."""
    plain = run_program(_FORKS.format(call="step", end_of_child="del x, y"))
    if "hung 0" not in plain:
        pytest.skip("children that drop tensors beside uncaptured calls hang, too")
    graphs = run_program(_FORKS.format(call="graphed", end_of_child="del other; pygraph.reset()"))
    assert "hung 0" in graphs


def test_a_process_ends_with_blocks_held_on_two_streams_and_launches_under_way() -> None:
    run_program("""
graphed, x = warmed_up(step)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    other, y = warmed_up(other_step)
    torch.cuda._sleep(60_000_000)
    kept = other(y)
torch.cuda._sleep(60_000_000)
result = graphed(x)
cycle = [graphed, other]
cycle.append(cycle)
assert is_in_use()
say("done")
""")

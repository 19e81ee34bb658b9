"""What a callable's Python can read and change on the host. Knows nothing of graphs.

host_state       the state of the host that a callable can see: compared, watched, put back
reachable        the walk that finds it (walk; visit_code, _modules, _containers, _objects)
probes           what is compared of objects whose contents the walk cannot list
schedulers       whether a call uses a learning-rate scheduler
random_states    where random number generators stand, and whether a callable seeds them
user_code        which code is the program's own, and which globals it reads
imports          what a function imports, and what it reads of that
host_output      whether a call prints or logs
program_state    a copy of all that a step changes, to put it back (explain, check)
"""

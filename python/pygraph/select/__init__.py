"""Selection: trials on the program's own calls, and decisions on disk."""

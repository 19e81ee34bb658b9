"""Which way to run is fastest? Trials on the program's own calls, and what they decided."""

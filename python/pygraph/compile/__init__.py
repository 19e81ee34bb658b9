"""While torch.compile compiles: the backend, and what it attaches to Inductor's code."""

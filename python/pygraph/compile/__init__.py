"""The backend of torch.compile, and the partitions that it attaches to Inductor's code."""

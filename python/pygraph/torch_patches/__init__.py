"""What replaces a part of PyTorch to make calls cheaper. Nothing but speed depends on it."""

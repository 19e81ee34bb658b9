"""The GPU and PyTorch's allocator, as the other packages use them."""

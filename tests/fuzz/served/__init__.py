"""Random changes of tensors between calls that the engine makes."""

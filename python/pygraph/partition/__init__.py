"""The states of a partition's signatures, at calls that the engine does not serve itself."""

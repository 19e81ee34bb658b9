"""The names of the transformations, apart from their code, which needs the engine."""

TRANSFORMS = ("cpu_scalars", "cpu_tensors", "constants", "cpu_outputs", "conditionals")

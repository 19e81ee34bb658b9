"""The names of the transformations, apart from their code, which needs the engine."""

LIBRARY_FUNCTIONS = "library_functions"  # before the FX graph: pygraph.substitutes
TRANSFORMS = (
    *("cpu_scalars", "cpu_tensors", "constants", "cpu_outputs"),
    LIBRARY_FUNCTIONS,
)

"""Is a graph's replay equal to the uncaptured run? Before it is used, and from time to time after."""

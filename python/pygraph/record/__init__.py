"""Records a function twice, and what a recording must know of its surroundings."""

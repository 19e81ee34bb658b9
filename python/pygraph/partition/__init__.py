"""At a call that the engine does not serve itself: what happens to a signature."""

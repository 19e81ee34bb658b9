"""Records a function twice, and collects what the linker must know about the process."""

"""Layer 5: the program. Read setup, loop, step, evaluate, exit in this order."""

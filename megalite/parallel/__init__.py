"""Layer 2: the rank grid and everything that communicates during a training step."""

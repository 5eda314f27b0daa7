"""Layer 1: what a user can set, how it is read, and what follows from it."""

"""Layer 1: measurements and where they are written."""

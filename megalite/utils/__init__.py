"""Layer 0: errors, logging, files and process groups. Imports nothing of megalite outside this package."""

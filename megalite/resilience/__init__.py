"""Layer 4: signals and clocks that end a run, and what a run does about its own faults."""

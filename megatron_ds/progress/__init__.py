"""Functions of progress: learning-rate ramps, cycles, and the difficulty of a curriculum. No torch."""

"""Functions of progress: learning-rate ramps, cycles, lengths of sequences, dropped tokens. No torch."""

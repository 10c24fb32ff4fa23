"""From a corpus to samples and batches: one stream, packed, fill in the middle."""

"""The samples of a BERT: pairs of segments, their order, masking, their batches."""

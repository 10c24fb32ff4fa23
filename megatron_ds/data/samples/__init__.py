"""From a corpus to samples and batches: for GPT (one stream, packed, fill in the middle) and for BERT."""

"""From text to a corpus: reading files, preprocessing, checksums, merging, training tokenizers."""

"""From text to a corpus: reading files, preprocessing, the `.bin/.idx` format, checksums, merging."""

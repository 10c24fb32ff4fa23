"""Easy samples first: difficulty metrics, their index files, the order of a curriculum, shorter sequences."""

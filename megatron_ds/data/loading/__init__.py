"""From corpora to the batches of a rank: data paths, blends, the cache of index maps, loaders."""

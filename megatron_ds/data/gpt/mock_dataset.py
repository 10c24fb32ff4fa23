"""Made-up samples, to try a layout or measure speed without a corpus. Learnable, so that a loss can be seen to fall."""

import numpy as np


class MockDataset:
    """Sample i counts upwards in steps of 1 to 4 from a random id, and starts anew after an end of document.

    A pure function of (seed, i). Ids are in [0, vocab_size).
    """

    def __init__(self, num_samples: int, *, seq_length: int, vocab_size: int, eod: int, seed: int):
        self.num_samples, self.seq_length, self.vocab_size = num_samples, seq_length, vocab_size
        self.eod, self.seed = eod, seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng((self.seed, i))
        end = int(random.integers(1, self.seq_length + 1))
        starts, steps = random.integers(0, self.vocab_size, 2), random.integers(1, 5, 2)
        places = np.arange(self.seq_length + 1, dtype=np.int64)
        tokens = np.where(places < end, starts[0] + steps[0] * places, starts[1] + steps[1] * (places - end)) % self.vocab_size
        tokens[end] = self.eod
        return {"tokens": tokens}

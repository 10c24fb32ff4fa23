"""What one machine offers: shared memory, large pages, scratch files, asynchronous I/O."""

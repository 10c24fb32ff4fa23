"""What one machine offers: memory that processes share, large pages, files as memory, scratch files,
asynchronous I/O.
"""

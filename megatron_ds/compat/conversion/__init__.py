"""Checkpoints of other programs: read and written in their formats, under their names for our parameters.

    reader     a folder → `RawCheckpoint`: tensors under the names of the files, not read yet, and settings
    family     a table of names and packings, used in both directions: `RawCheckpoint` ↔ `LogicalCheckpoint`
    format     reader, families and writer of one kind of folder (`formats.py`)

Nothing in a foreign file is executed, and one tensor is in memory at a time.
"""

"""BERT: its layers and loss, and how sentences become its samples."""

"""The file format of a corpus, `.bin/.idx`, and of the loss masks beside it."""

"""Fill in the middle: documents whose middle moves to their end."""

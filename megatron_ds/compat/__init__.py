"""Names and dialects of other programs, on top of this package. The core never imports it."""

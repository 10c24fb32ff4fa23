"""What layers read: a micro-batch, the ledger of its losses and metrics, and its document boundaries."""

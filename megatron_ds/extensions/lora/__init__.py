"""Low-rank adapters: small trained matrices beside the frozen linear layers of a model."""

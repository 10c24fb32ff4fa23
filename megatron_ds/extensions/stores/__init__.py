"""Object stores as places of checkpoints: s3://, gs:// and others of fsspec."""

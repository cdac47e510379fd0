"""Who serves what: in one process, over gRPC, or asked from the block servers themselves."""

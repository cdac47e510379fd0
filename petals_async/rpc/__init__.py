"""gRPC and protobuf, and nothing else of the project knows either."""

"""KV caches as tensors, the backend that runs a span over them, and the one compute worker."""

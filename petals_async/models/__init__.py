"""How a causal LM is cut: checkpoint reading, the span of blocks, the client's edges (embeddings, norm, head)."""

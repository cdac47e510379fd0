"""The public test kit: an in-memory swarm, fault plans, conformance checks."""

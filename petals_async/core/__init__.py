"""Pure values and decisions: no I/O, clock, randomness, event loop, gRPC, torch or logging in here."""

"""Generated from protos/ by `make generate`; never edited."""

"""The `petals-async` command."""

"""Benchmarks: each prints one JSON object with medians and ratios from one run. See README.md here."""

"""Measurements of Helios and of any other OpenAI-compatible server; benchmarks/README.md has the protocol."""

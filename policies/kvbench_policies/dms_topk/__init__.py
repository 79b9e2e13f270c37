"""The gate of DMS as a static priority under a hard budget."""

"""Stored rows to statistics and tables: pure functions, no model."""

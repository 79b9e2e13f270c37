"""Suites and training recipes as TOML files, found by name through `kvbench.recipes`. Data only."""

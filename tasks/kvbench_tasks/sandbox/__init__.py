"""Runs what a model wrote where it can do no harm, and tells whether it is right: docs/sandbox.md."""

"""What kvbench itself costs, measured."""

"""A third party's policy and task."""

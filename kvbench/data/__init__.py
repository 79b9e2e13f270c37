"""Records of data sets: from the hub, a folder or a file, and the lock that keeps them the same."""
